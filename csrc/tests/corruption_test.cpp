#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "megatronapp/error.hpp"
#include "megatronapp/ring_reader.hpp"
#include "megatronapp/ring_writer.hpp"
#include "temporary_ring.hpp"

namespace megatronapp::testing {
namespace {

class Corruption : public RingTest {
  protected:
    std::string good_ring() {
        RingWriter writer(path_, 20, 1, "metadata");
        for (std::uint64_t i = 0; i < 30; ++i) {
            writer.record(span_of(i));
        }
        std::ifstream file(path_, std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }

    void write(const std::string& bytes) { std::ofstream(path_, std::ios::binary) << bytes; }

    /// Opens, reads and describes; true if the file was refused, false if it was read. Anything else is a crash.
    bool refused() {
        try {
            RingReader reader(path_);
            static_cast<void>(read_batch(reader, 1000));
            static_cast<void>(reader.info());
            return false;
        } catch (const RingError&) {
            return true;
        }
    }
};

TEST_F(Corruption, RefusesEveryOtherLength) {
    const std::string good = good_ring();
    for (std::size_t bytes = 0; bytes < good.size(); bytes += bytes < 1024 ? 1 : 97) {
        write(good.substr(0, bytes));
        ASSERT_TRUE(refused()) << bytes << " of " << good.size() << " bytes";
    }
    write(good + "x");
    EXPECT_TRUE(refused());
    write(good);
    EXPECT_FALSE(refused());
}

TEST_F(Corruption, RefusesDamageToAnyFixedField) {
    const std::string good = good_ring();
    for (std::size_t at = 0; at < sizeof(FixedHeader); ++at) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 0x41);
        write(bad);
        EXPECT_TRUE(refused()) << "byte " << at;
    }
}

TEST_F(Corruption, SurvivesRandomDamage) {
    const std::string good = good_ring();
    std::mt19937_64 random(1);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same damage in every run
    for (int round = 0; round < 2000; ++round) {
        std::string bad = good;
        for (int i = 0; i < 1 + round % 40; ++i) {
            bad[random() % bad.size()] = static_cast<char>(random());
        }
        for (int i = 0; i < 4; ++i) {  // the counters most of all
            bad[sizeof(FixedHeader) + random() % (sizeof(RingHeader) - sizeof(FixedHeader))] =
                static_cast<char>(random());
        }
        write(bad);
        static_cast<void>(refused());
    }
}

TEST_F(Corruption, RefusesWhatIsNotAFile) {
    std::filesystem::create_directory(path_);
    EXPECT_TRUE(refused());
    std::filesystem::remove(path_);
    EXPECT_TRUE(refused());
    ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
    EXPECT_TRUE(refused());
}

TEST_F(Corruption, NoticesThatTheFileWasCutWhileOpen) {
    write(good_ring());
    RingReader reader(path_);
    std::filesystem::resize_file(path_, 4096);
    EXPECT_THROW(static_cast<void>(reader.info()), RingError);
    EXPECT_THROW(static_cast<void>(read_batch(reader, 10)), RingError);
}

TEST_F(Corruption, NoticesThatTheCountWentBack) {
    const std::string good = good_ring();
    write(good);
    RingReader reader(path_);
    ASSERT_EQ(read_batch(reader, 100).lost, 10U);
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(offsetof(RingHeader, records) + offsetof(RingCounters, commit));
    file.write("\0\0\0\0\0\0\0\0", 8);
    file.close();
    EXPECT_THROW(static_cast<void>(read_batch(reader, 10)), RingError);
}

}  // namespace
}  // namespace megatronapp::testing
