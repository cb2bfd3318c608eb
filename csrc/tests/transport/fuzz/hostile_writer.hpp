#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "../shared_words.hpp"
#include "megatronapp/transport/shm/layout.hpp"

namespace megatronapp::transport::fuzzing {

/// Writes to the boards and inboxes of ranks what no rank writes: damage, and entries with a right check.
///
/// Each writer draws a few kinds of mutations, so that some cases meet one kind alone.
class HostileWriter {
  public:
    HostileWriter(const std::string& directory, const std::vector<std::string>& names, std::uint64_t slots,
                  std::uint64_t slot_bytes, std::uint64_t seed);

    /// Whether a message that is received all the same must have the bytes that were sent.
    [[nodiscard]] bool keeps_contents() const noexcept;

    void mutate();

  private:
    enum class Kind : std::uint8_t {
        kFlip,      ///< one bit of a word
        kWord,      ///< a random or a small number
        kTorn,      ///< some bytes of a word
        kMove,      ///< a word of another place
        kGoBack,    ///< all words of a file as they were before
        kState,     ///< states, bells, followers and cursors
        kAnnounce,  ///< an announcement with a right check; this kind and those below spoil contents
        kReturn,    ///< a returned slot with a right check
        kLog,       ///< an entry of a log with a right check
        kData,      ///< bytes of a slot
    };
    static constexpr std::uint64_t kKinds = 10;

    struct File {
        testing::SharedWords words;
        std::uint64_t control;  ///< number of words before the slots
        bool board;
        std::vector<std::uint64_t> before;
    };

    [[nodiscard]] std::uint64_t below(std::uint64_t count) { return random_() % count; }
    [[nodiscard]] File& file(bool board);
    [[nodiscard]] Word& control_word();
    [[nodiscard]] std::uint64_t number();
    void tear(Word& word);
    static void go_back(File& chosen);
    void write_state();
    void announce();
    void give_back();
    void append();
    void write_data();
    template <std::size_t Words>
    void forge(Word& count, SharedEntry<Words>* entries, std::uint64_t capacity, const RingEntry<Words>& entry);

    std::mt19937_64 random_;
    std::uint64_t slots_;
    std::uint64_t slot_bytes_;
    InboxLayout layout_;
    std::vector<File> files_;
    std::vector<Kind> kinds_;
};

}  // namespace megatronapp::transport::fuzzing
