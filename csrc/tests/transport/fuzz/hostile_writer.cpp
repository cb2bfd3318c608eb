#include "hostile_writer.hpp"

#include <algorithm>
#include <array>

#include "fuzz.hpp"
#include "megatronapp/clock.hpp"

namespace megatronapp::transport::fuzzing {

HostileWriter::HostileWriter(const std::string& directory, const std::vector<std::string>& names, std::uint64_t slots,
                             std::uint64_t slot_bytes, std::uint64_t seed)
    : random_(seed), slots_(slots), slot_bytes_(slot_bytes), layout_(InboxLayout::of(slots, slot_bytes)) {
    for (const std::string& name : names) {
        const bool board = name.ends_with("board");
        testing::SharedWords words(std::string(directory).append("/").append(name),
                                   board ? sizeof(BoardLayout) : layout_.file_bytes);
        require(words.valid(), "cannot map " + name);
        const std::uint64_t control = board ? words.count() : layout_.data / sizeof(Word);
        files_.push_back({std::move(words), control, board, {}});
    }
    for (std::uint64_t count = 1 + below(3); count > 0; --count) {
        kinds_.push_back(static_cast<Kind>(below(kKinds)));
    }
}

bool HostileWriter::keeps_contents() const noexcept {
    return std::all_of(kinds_.begin(), kinds_.end(), [](Kind kind) { return kind < Kind::kAnnounce; });
}

void HostileWriter::mutate() {
    switch (kinds_[below(kinds_.size())]) {
        case Kind::kFlip:
            control_word().fetch_xor(std::uint64_t{1} << below(64));
            break;
        case Kind::kWord:
            control_word().store(number());
            break;
        case Kind::kTorn:
            tear(control_word());
            break;
        case Kind::kMove:
            control_word().store(control_word().load());
            break;
        case Kind::kGoBack:
            go_back(files_[below(files_.size())]);
            break;
        case Kind::kState:
            write_state();
            break;
        case Kind::kAnnounce:
            announce();
            break;
        case Kind::kReturn:
            give_back();
            break;
        case Kind::kLog:
            append();
            break;
        case Kind::kData:
            write_data();
            break;
    }
}

HostileWriter::File& HostileWriter::file(bool board) {
    while (true) {
        File& chosen = files_[below(files_.size())];
        if (chosen.board == board) {
            return chosen;
        }
    }
}

/// Half of them are in the first lines, which hold the counts and states.
Word& HostileWriter::control_word() {
    const File& chosen = files_[below(files_.size())];
    return chosen.words.word(below(below(2) == 0 ? std::min<std::uint64_t>(64, chosen.control) : chosen.control));
}

/// A number that is near a bound of some type or of this transport, or any.
std::uint64_t HostileWriter::number() {
    const std::array<std::uint64_t, 10> edges{
        0,        1, slots_ - 1, slots_, slot_bytes_, 1ULL << 32, 1ULL << 63U, (1ULL << 32U) - 1, ~std::uint64_t{0},
        random_()};
    const std::uint64_t drawn = below(4) == 0 ? below(8) : edges[below(edges.size())];
    return below(4) == 0 ? drawn + 1 : drawn;
}

void HostileWriter::tear(Word& word) {
    const std::uint64_t mask = ~std::uint64_t{0} >> (8 * (1 + below(7)));
    const std::uint64_t kept = below(2) == 0 ? mask : ~mask;
    word.store((word.load() & kept) | (random_() & ~kept));
}

void HostileWriter::go_back(File& chosen) {
    if (chosen.before.empty()) {
        for (std::uint64_t i = 0; i < chosen.control; ++i) {
            chosen.before.push_back(chosen.words.word(i).load());
        }
        return;
    }
    for (std::uint64_t i = 0; i < chosen.control; ++i) {
        chosen.words.word(i).store(chosen.before[i]);
    }
    chosen.before.clear();
}

void HostileWriter::write_state() {
    auto& board = *reinterpret_cast<BoardLayout*>(file(true).words.data());
    Bell& bell = below(2) == 0 ? board.activity : board.credits;
    Follower& follower = board.followers[below(2)];
    switch (below(7)) {
        case 0:
            board.state.store(below(2) == 0 ? kClosedWord : number());
            break;
        case 1:
            board.gave_up.store(number());
            break;
        case 2:
            bell.count.store(static_cast<std::uint32_t>(number()));
            break;
        case 3:
            bell.sleepers.store(static_cast<std::uint32_t>(number()));
            break;
        case 4:
            follower.rank.store(below(2) == 0 ? 2 : number());
            break;
        case 5:
            follower.cursor.store(below(2) == 0 ? board.log_count.load() + below(2) : number());
            break;
        default:
            reinterpret_cast<InboxHeader*>(file(false).words.data())->attached.store(number());
    }
}

/// Sometimes the count comes first, so that the entry is read before or while it is written.
template <std::size_t Words>
void HostileWriter::forge(Word& count, SharedEntry<Words>* entries, std::uint64_t capacity,
                          const RingEntry<Words>& entry) {
    const std::uint64_t place = count.load();
    if (below(4) == 0) {
        count.store(place + 1);
    }
    SharedEntry<Words>& target = entries[place % capacity];
    for (std::size_t i = 0; i < Words; ++i) {
        target[i].store(entry[i]);
    }
    target[Words].store(check_of(place, entry));
    count.store(place + 1);
}

void HostileWriter::announce() {
    const File& inbox = file(false);
    auto& header = *reinterpret_cast<InboxHeader*>(inbox.words.data());
    auto* entries = reinterpret_cast<Announcement*>(inbox.words.data() + layout_.announcements);
    const std::uint64_t key = below(2) == 0 ? header.announced.load() + below(3) : number();
    const std::uint64_t bytes = below(2) == 0 ? below(slot_bytes_ + 2) : number();
    const std::uint64_t slot = below(2) == 0 ? below(slots_ + 1) : number();
    const std::uint64_t start_ns = below(2) == 0 ? monotonic_ns() : number();
    const std::uint64_t end_ns = below(2) == 0 ? start_ns + below(1000) : number();
    const std::uint64_t queued_ns = below(2) == 0 ? start_ns - below(1000) : number();
    forge<kAnnouncementWords>(header.announced, entries, slots_, {key, bytes, slot, start_ns, end_ns, queued_ns});
}

void HostileWriter::give_back() {
    const File& inbox = file(false);
    auto& header = *reinterpret_cast<InboxHeader*>(inbox.words.data());
    auto* entries = reinterpret_cast<ReturnedSlot*>(inbox.words.data() + layout_.returned_slots);
    forge<1>(header.returned, entries, slots_, {below(2) == 0 ? below(slots_) : number()});
}

void HostileWriter::append() {
    auto& board = *reinterpret_cast<BoardLayout*>(file(true).words.data());
    forge<1>(board.log_count, board.log.data(), kLogEntries, {number()});
}

void HostileWriter::write_data() {
    const File& inbox = file(false);
    inbox.words.word(inbox.control + below(inbox.words.count() - inbox.control)).store(random_());
}

}  // namespace megatronapp::transport::fuzzing
