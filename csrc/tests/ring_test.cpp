#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>

#include "megatronapp/error.hpp"
#include "megatronapp/ring_reader.hpp"
#include "megatronapp/ring_writer.hpp"
#include "temporary_ring.hpp"

namespace {

bool fchmod_fails = false;  // as on file systems without modes

}  // namespace

/// Takes the place of the C library's in this program.
extern "C" int fchmod(int fd, mode_t mode) noexcept {
    if (fchmod_fails) {
        errno = EPERM;
        return -1;
    }
    return static_cast<int>(::syscall(SYS_fchmod, fd, mode));
}

namespace megatronapp::testing {
namespace {

constexpr std::uint64_t kBlockBytes = 512;  // of stat

using Ring = RingTest;

TEST_F(Ring, DescribesItself) {
    const std::string metadata(5000, 'm');
    RingWriter writer(path_, 100, 7, metadata);
    const RingInfo info = RingReader(path_).info();
    EXPECT_EQ(info.attempt, 7U);
    EXPECT_EQ(info.capacity, 100U);
    EXPECT_EQ(info.head, 0U);
    EXPECT_FALSE(info.closed);
    EXPECT_EQ(info.boot_id, boot_id());
    EXPECT_EQ(info.clock_id, static_cast<std::uint64_t>(CLOCK_MONOTONIC));
    EXPECT_EQ(info.pid, static_cast<std::uint64_t>(::getpid()));
    EXPECT_GT(info.heartbeat_ns, 0U);
    EXPECT_FALSE(info.open_span.has_value());
    EXPECT_EQ(info.clock_pairs.size(), 1U);
    EXPECT_EQ(info.metadata, metadata);
}

TEST_F(Ring, IsReadableByItsGroupWhateverTheUmask) {
    const mode_t before = ::umask(0077);
    RingWriter writer(path_, 1, 0, "");
    ::umask(before);
    struct stat status {};
    ASSERT_EQ(::stat(path_.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777U, 0640U);
    EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * kBlockBytes, static_cast<std::uint64_t>(status.st_size));
}

TEST_F(Ring, PacksTheFieldsWhereTheSchemaPutsThem) {
    const Item<kRecordWords> item = pack({1, 16, 3, 4, 5, 6, 7, 8, 9, 10, 11});
    EXPECT_EQ(item[0], 1U);
    EXPECT_EQ(item[1], 0x0000'0003'0000'0002U);
    EXPECT_EQ(item[2], 0x0000'0005'0000'0004U);
    EXPECT_EQ(item[3], 0x0B0A'0908'0007'0006U);
}

TEST_F(Ring, SaturatesLongDurations) {
    Span span{};
    span.duration_ns = kMaxDurationUnits * kDurationUnitNs + kDurationUnitNs - 1;
    EXPECT_EQ(pack(span)[1], kMaxDurationUnits);
    EXPECT_EQ(pack(span)[3] >> 56U, 0U);
    span.duration_ns += 1;
    EXPECT_EQ(pack(span)[1], kMaxDurationUnits);
    EXPECT_EQ(pack(span)[3] >> 56U, kFlagSaturated);
}

TEST_F(Ring, ReadsInOrderInPieces) {
    RingWriter writer(path_, 100, 0, "");
    RingReader reader(path_);
    for (std::uint64_t i = 0; i < 60; ++i) {
        writer.record(span_of(i));
    }
    for (std::uint64_t i = 0; i < 60; i += 20) {
        const Batch batch = read_batch(reader, 20);
        ASSERT_EQ(batch.records.size(), 20U);
        EXPECT_EQ(batch.records.front()[0], i);
        EXPECT_EQ(batch.lost, 0U);
    }
    EXPECT_TRUE(read_batch(reader, 20).records.empty());
}

TEST_F(Ring, CountsWhatWasOverwritten) {
    RingWriter writer(path_, 10, 0, "");
    RingReader reader(path_);
    for (std::uint64_t i = 0; i < 25; ++i) {
        writer.record(span_of(i));
    }
    const Batch batch = read_batch(reader, 1000);
    EXPECT_EQ(batch.lost, 15U);
    ASSERT_EQ(batch.records.size(), 10U);
    EXPECT_EQ(batch.records.front(), pack(span_of(15)));
    EXPECT_EQ(batch.records.back(), pack(span_of(24)));
    EXPECT_EQ(reader.info().overwritten, 15U);
    EXPECT_EQ(reader.next_index(), 25U);
}

TEST_F(Ring, ShowsTheInnermostOpenSpan) {
    RingWriter writer(path_, 1, 0, "");
    const RingReader reader(path_);
    writer.open_span({.start_ns = 11, .step = 0xFFFF'FFFF, .microbatch = 0xFFFF, .kind = 1});
    writer.open_span({.start_ns = 22, .step = 5, .microbatch = 6, .kind = 255});
    auto span = reader.info().open_span;
    ASSERT_TRUE(span.has_value());
    EXPECT_EQ(span->start_ns, 22U);
    EXPECT_EQ(span->step, 5U);
    EXPECT_EQ(span->microbatch, 6U);
    EXPECT_EQ(span->kind, 255U);
    writer.close_span();
    span = reader.info().open_span;
    ASSERT_TRUE(span.has_value());
    EXPECT_EQ(span->start_ns, 11U);
    EXPECT_EQ(span->step, 0xFFFF'FFFFU);
    writer.close_span();
    EXPECT_FALSE(reader.info().open_span.has_value());
    writer.close_span();  // one too many
    EXPECT_FALSE(reader.info().open_span.has_value());
}

TEST_F(Ring, CountsSpansThatNestTooDeep) {
    RingWriter writer(path_, 1, 0, "");
    const RingReader reader(path_);
    for (std::uint64_t i = 0; i < RingWriter::kMaxOpenSpans + 3; ++i) {
        writer.open_span({.start_ns = i, .step = 0, .microbatch = 0, .kind = 1});
    }
    EXPECT_EQ(reader.info().open_span->start_ns, RingWriter::kMaxOpenSpans - 1);
    for (std::uint64_t i = 0; i < RingWriter::kMaxOpenSpans + 2; ++i) {
        writer.close_span();
    }
    EXPECT_EQ(reader.info().open_span->start_ns, 0U);
}

TEST_F(Ring, KeepsTheEightNewestClockPairs) {
    RingWriter writer(path_, 1, 0, "");
    const std::uint64_t before_last = monotonic_ns();
    for (int i = 0; i < 30; ++i) {
        writer.clock_pair();
    }
    const std::vector<ClockPair> pairs = RingReader(path_).info().clock_pairs;
    ASSERT_EQ(pairs.size(), kClockPairs);
    EXPECT_GE(pairs.front().monotonic_ns, before_last);
    for (std::size_t i = 1; i < pairs.size(); ++i) {
        EXPECT_GT(pairs[i].monotonic_ns, pairs[i - 1].monotonic_ns);
    }
}

TEST_F(Ring, RecordBeatsTheHeart) {
    RingWriter writer(path_, 1, 0, "");
    const std::uint64_t before = coarse_monotonic_ns();
    writer.record(span_of(1));
    EXPECT_GE(RingReader(path_).info().heartbeat_ns, before);
}

TEST_F(Ring, CloseEndsRecordingAndKeepsWhatWasWritten) {
    RingWriter writer(path_, 10, 0, "");
    RingReader reader(path_);
    writer.record(span_of(1));
    writer.close(true);
    writer.record(span_of(2));
    EXPECT_TRUE(reader.info().closed);
    EXPECT_EQ(read_batch(reader, 10).records.size(), 1U);
    EXPECT_THROW(RingReader{path_}, RingError);
}

TEST_F(Ring, ForkedChildWritesNothing) {
    RingWriter writer(path_, 10, 0, "");
    RingReader reader(path_);
    writer.record(span_of(1));
    writer.open_span({5, 1, 2, 3});
    const RingInfo before = reader.info();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        ::usleep(20'000);  // more than a tick of the clock of heartbeats
        writer.record(span_of(100));
        writer.record(span_of(101));
        writer.close_span();
        writer.heartbeat();
        writer.clock_pair();
        ::_exit(0);
    }
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    const RingInfo after = reader.info();
    EXPECT_EQ(after.head, before.head);
    EXPECT_EQ(after.heartbeat_ns, before.heartbeat_ns);
    EXPECT_TRUE(after.open_span.has_value());
    EXPECT_EQ(after.clock_pairs.size(), before.clock_pairs.size());
    writer.record(span_of(2));
    const Batch batch = read_batch(reader, 10);
    ASSERT_EQ(batch.records.size(), 2U);
    EXPECT_EQ(batch.records[0], pack(span_of(1)));
    EXPECT_EQ(batch.records[1], pack(span_of(2)));
}

TEST_F(Ring, LeavesNoDraftWhereTheModeCannotBeSet) {
    fchmod_fails = true;
    EXPECT_THROW(RingWriter(path_, 10, 0, ""), RingError);
    fchmod_fails = false;
    EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
    EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(Ring, ForkedChildDoesNotCloseIt) {
    RingWriter writer(path_, 10, 0, "");
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        writer.close(true);
        ::_exit(0);
    }
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    EXPECT_FALSE(RingReader(path_).info().closed);
}

TEST_F(Ring, ReplacesALeftover) {
    std::ofstream(path_) << "from a dead run";
    std::ofstream(path_ + ".new") << "half made";
    RingWriter writer(path_, 10, 3, "");
    EXPECT_EQ(RingReader(path_).info().attempt, 3U);
    EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

TEST_F(Ring, RefusesCapacitiesThatCannotBe) {
    EXPECT_THROW(RingWriter(path_, 0, 0, ""), RingError);
    EXPECT_THROW(RingWriter(path_, kMaxCapacity + 1, 0, ""), RingError);
    EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(Ring, RefusesToStartWithoutRoomAndLeavesNothing) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        static_cast<void>(std::signal(SIGXFSZ, SIG_IGN));
        const rlimit limit{1 << 20, 1 << 20};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        int code = 1;
        try {
            RingWriter(path_, 65536, 0, "");
        } catch (const RingError& error) {
            const bool named = std::string(error.what()).find("no room for a ring") != std::string::npos;
            const bool clean = !std::filesystem::exists(path_) && !std::filesystem::exists(path_ + ".new");
            code = named && clean ? 0 : 2;
        }
        ::_exit(code);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace megatronapp::testing
