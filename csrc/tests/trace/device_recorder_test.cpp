#include "megatronapp/trace/device_recorder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>

#include "../temporary_ring.hpp"
#include "megatronapp/error.hpp"
#include "simulated_device.hpp"

namespace megatronapp::testing {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint8_t kStep = 1;
constexpr std::uint8_t kForward = 3;
constexpr std::uint8_t kBackward = 4;
constexpr std::uint8_t kGradReduce = 9;
constexpr std::uint8_t kGradNorm = 12;
constexpr std::uint8_t kOptimizer = 13;
constexpr std::uint8_t kDeviceClockAndLead = 16 | 128;

std::uint64_t start_of(const Item<kRecordWords>& item) { return item[0]; }
std::uint64_t end_of(const Item<kRecordWords>& item) { return item[0] + (item[1] & 0xFFFF'FFFF) * kDurationUnitNs; }
std::uint32_t step_of(const Item<kRecordWords>& item) { return static_cast<std::uint32_t>(item[1] >> 32U); }
std::uint8_t kind_of(const Item<kRecordWords>& item) { return static_cast<std::uint8_t>(item[3] >> 32U); }
std::uint8_t flags_of(const Item<kRecordWords>& item) { return static_cast<std::uint8_t>(item[3] >> 56U); }
std::uint32_t aux_of(const Item<kRecordWords>& item) { return static_cast<std::uint32_t>(item[2] >> 32U); }

class DeviceRecorders : public RingTest {
  protected:
    void open(double ppm) {
        SimulatedDevice::reset(ppm);
        ring_ = std::make_unique<RingWriter>(path_, 1 << 16, 0, "{}");
        recorder_ =
            std::make_unique<DeviceRecorder>(ring_.get(), SimulatedDevice::driver(), 0, &SimulatedDevice::read_clock);
        reader_ = std::make_unique<RingReader>(path_);
    }

    void TearDown() override {
        recorder_.reset();
        EXPECT_EQ(SimulatedDevice::events, 0);
        EXPECT_EQ(SimulatedDevice::contexts, 0);
    }

    static Span key(std::uint8_t kind, std::uint32_t step, std::uint16_t microbatch = 0xFFFF) {
        return {.start_ns = 0,
                .duration_ns = 0,
                .step = step,
                .ordinal = 0,
                .aux = 0,
                .comm = 0xFFFF,
                .microbatch = microbatch,
                .kind = kind,
                .chunk = 0,
                .layer = 0,
                .flags = 0};
    }

    std::uint64_t begin(std::uint8_t kind, std::uint32_t step, std::uint16_t microbatch = 0xFFFF) {
        truth_[{step, kind, microbatch}] = SimulatedDevice::next_ns();
        return recorder_->begin(key(kind, step, microbatch), nullptr);
    }

    void work(std::uint8_t kind, std::uint32_t step, std::uint16_t microbatch, std::uint64_t device_ns,
              std::uint64_t host_ns) {
        const std::uint64_t number = begin(kind, step, microbatch);
        SimulatedDevice::launch(device_ns, host_ns);
        recorder_->end(number, 0, false, nullptr);
    }

    /// A step in which the host is ahead of the device, except where it reads the norm of the gradients.
    void train(std::uint32_t step, std::uint64_t optimizer_ns) {
        const std::uint64_t whole = begin(kStep, step);
        for (std::uint16_t microbatch = 0; microbatch < 8; ++microbatch) {
            work(kForward, step, microbatch, 20 * kMs, 5 * kMs);
            work(kBackward, step, microbatch, 40 * kMs, 6 * kMs);
            recorder_->harvest();
        }
        const std::uint64_t norm = begin(kGradNorm, step);
        SimulatedDevice::launch(2 * kMs, kMs);
        SimulatedDevice::synchronize();
        recorder_->end(norm, 0, true, nullptr);
        work(kOptimizer, step, 0xFFFF, optimizer_ns, 2 * kMs);
        recorder_->end(whole, 0, false, nullptr);
        recorder_->harvest();
    }

    [[nodiscard]] double largest_error_us(std::uint64_t& count) {
        double worst_us = 0;
        const Batch batch = read_batch(*reader_, 1 << 16);
        EXPECT_EQ(batch.lost, 0U);
        for (const Item<kRecordWords>& item : batch.records) {
            const auto microbatch = static_cast<std::uint16_t>(item[3] >> 16U);
            const std::uint64_t truth_ns = truth_.at({step_of(item), kind_of(item), microbatch});
            const auto error_ns = static_cast<std::int64_t>(start_of(item) - truth_ns);
            worst_us = std::max(worst_us, std::abs(static_cast<double>(error_ns)) / 1e3);
            ++count;
        }
        return worst_us;
    }

    std::unique_ptr<RingWriter> ring_;
    std::unique_ptr<DeviceRecorder> recorder_;
    std::unique_ptr<RingReader> reader_;
    std::map<std::tuple<std::uint32_t, std::uint8_t, std::uint16_t>, std::uint64_t> truth_;
};

class Drift : public DeviceRecorders, public ::testing::WithParamInterface<double> {};

TEST_P(Drift, TimesAreRightWithin20MicrosecondsForHalfAnHour) {
    open(GetParam());
    constexpr std::uint32_t kSteps = 3660;  // of 0.494 s
    std::uint64_t count = 0;
    double worst_us = 0;
    for (std::uint32_t step = 0; step < kSteps; ++step) {
        train(step, 12 * kMs);
        worst_us = std::max(worst_us, largest_error_us(count));
        truth_.erase(truth_.begin(), truth_.lower_bound({step > 8 ? step - 8 : 0, 0, 0}));
    }
    SimulatedDevice::synchronize();
    SimulatedDevice::now_ns += SimulatedDevice::kPassNs;
    recorder_->harvest(true);
    worst_us = std::max(worst_us, largest_error_us(count));
    EXPECT_EQ(count, kSteps * 19U);
    EXPECT_LE(worst_us, 20.0);
    EXPECT_EQ(recorder_->dropped(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Rates, Drift, ::testing::Values(-50.0, 50.0));

TEST_F(DeviceRecorders, SpansNestOrDoNotMeet) {
    open(35.0);
    for (std::uint32_t step = 0; step < 6; ++step) {
        train(step, kMs);
    }
    SimulatedDevice::now_ns += 1000 * kMs;
    recorder_->harvest(true);
    std::vector<Item<kRecordWords>> records = read_batch(*reader_, 1 << 16).records;
    ASSERT_EQ(records.size(), 6U * 19U);
    for (const auto& first : records) {
        EXPECT_EQ(flags_of(first), kDeviceClockAndLead);
        for (const auto& second : records) {
            const bool overlap = start_of(first) < start_of(second) && start_of(second) < end_of(first) &&
                                 end_of(first) < end_of(second);
            EXPECT_FALSE(overlap) << static_cast<int>(kind_of(first)) << ' ' << static_cast<int>(kind_of(second));
        }
    }
}

TEST_F(DeviceRecorders, ASpanTellsHowFarItsHostWasAhead) {
    open(0.0);
    work(kForward, 0, 0, 50 * kMs, 2 * kMs);
    SimulatedDevice::synchronize();
    recorder_->harvest(true);
    const std::vector<Item<kRecordWords>> records = read_batch(*reader_, 10).records;
    ASSERT_EQ(records.size(), 1U);
    EXPECT_NEAR(static_cast<double>(end_of(records[0]) - start_of(records[0])), 50e6, 10e3);
    EXPECT_NEAR(static_cast<double>(aux_of(records[0])) * kDurationUnitNs, 48e6, 20e3);
    const std::vector<DeviceLength> lengths = recorder_->take_lengths();
    ASSERT_EQ(lengths.size(), 1U);
    EXPECT_EQ(lengths[0].kind, kForward);
    EXPECT_NEAR(static_cast<double>(lengths[0].duration_ns), 50e6, 10e3);
    EXPECT_TRUE(recorder_->take_lengths().empty());
}

TEST_F(DeviceRecorders, APointIsTheTimeAtWhichTheStreamGotThere) {
    open(0.0);
    SimulatedDevice::launch(30 * kMs, kMs);
    const std::uint64_t truth_ns = SimulatedDevice::next_ns();
    Span post = key(5, 0);
    post.aux = 256;
    post.flags = 2;
    recorder_->mark(post, nullptr);
    SimulatedDevice::now_ns += 50 * kMs;
    recorder_->harvest(true);
    const std::vector<Item<kRecordWords>> records = read_batch(*reader_, 10).records;
    ASSERT_EQ(records.size(), 1U);
    EXPECT_NEAR(static_cast<double>(start_of(records[0])), static_cast<double>(truth_ns), 20e3);
    EXPECT_EQ(end_of(records[0]), start_of(records[0]));
    EXPECT_EQ(aux_of(records[0]), 256U);
    EXPECT_EQ(flags_of(records[0]), 16 | 2);
}

TEST_F(DeviceRecorders, PublishesWhereTheDeviceIsWhileTheHostIsAhead) {
    open(0.0);
    const std::uint64_t whole = begin(kStep, 7);
    work(kBackward, 7, 3, SimulatedDevice::kNever, kMs);  // hangs
    const std::uint64_t reduce = begin(kGradReduce, 7);
    SimulatedDevice::now_ns += 10 * kMs;
    recorder_->harvest();
    const RingInfo info = reader_->info();
    ASSERT_TRUE(info.open_span);
    EXPECT_EQ(info.open_span->kind, kGradReduce);
    ASSERT_TRUE(info.device_span);
    EXPECT_EQ(info.device_span->kind, kBackward);
    EXPECT_EQ(info.device_span->microbatch, 3);
    EXPECT_EQ(info.device_span->step, 7U);
    recorder_->end(reduce, 0, false, nullptr);
    recorder_->end(whole, 0, false, nullptr);
}

TEST_F(DeviceRecorders, ADeviceThatHasCaughtUpIsNowhere) {
    open(0.0);
    const std::uint64_t whole = begin(kStep, 0);
    work(kForward, 0, 0, 5 * kMs, kMs);
    SimulatedDevice::now_ns += kMs;
    recorder_->harvest();
    ASSERT_TRUE(reader_->info().device_span);
    SimulatedDevice::now_ns += 10 * kMs;
    recorder_->harvest();
    EXPECT_FALSE(reader_->info().device_span);
    recorder_->end(whole, 0, false, nullptr);
}

TEST_F(DeviceRecorders, AFullQueueDropsWholeSpansAndCountsThem) {
    open(0.0);
    SimulatedDevice::launch(SimulatedDevice::kNever, 0);
    const std::size_t fit = (DeviceRecorder::kMostPending - DeviceRecorder::kMostOpen) / 2;
    for (std::size_t i = 0; i < fit + 100; ++i) {
        work(kForward, 0, 0, 0, 0);
    }
    EXPECT_EQ(recorder_->dropped(), 100U);
    SimulatedDevice::busy_until_ns = SimulatedDevice::now_ns;
}

TEST_F(DeviceRecorders, AFailureOfTheDriverEndsRecordingAndIsReported) {
    open(0.0);
    work(kForward, 0, 0, kMs, kMs);
    SimulatedDevice::query_code = 700;
    recorder_->harvest();
    EXPECT_EQ(recorder_->failure(), "cuEventQuery failed with CUDA_ERROR_OF_THE_SIMULATION (700)");
    EXPECT_EQ(recorder_->begin(key(kForward, 1), nullptr), 0U);
    recorder_->record(key(kStep, 1));  // of the host
    recorder_->harvest();
    EXPECT_EQ(read_batch(*reader_, 10).records.size(), 1U);
    SimulatedDevice::query_code = kDriverSuccess;
}

/// Functions of a driver whose events are passed at once, in real time, whichever thread asks.
EventDriver immediate_driver() {
    EventDriver driver = SimulatedDevice::driver();
    driver.event_create = [](DeviceEvent* event, unsigned) {
        *event = new DeviceEventHandle{};
        return kDriverSuccess;
    };
    driver.event_destroy = [](DeviceEvent event) {
        delete event;
        return kDriverSuccess;
    };
    driver.event_record = [](DeviceEvent event, DeviceStream) {
        event->passed_ns = monotonic_ns();
        return kDriverSuccess;
    };
    driver.event_query = [](DeviceEvent) { return kDriverSuccess; };
    return driver;
}

TEST_F(DeviceRecorders, TheThreadWritesWhatTheOtherRecordsMeanwhile) {
    open(0.0);
    constexpr std::uint32_t kSpans = 5'000;
    DeviceRecorder recorder(ring_.get(), immediate_driver(), 0);
    recorder.start();
    std::size_t lengths = 0;
    for (std::uint32_t step = 0; step < kSpans; ++step) {
        const std::uint64_t number = recorder.begin(key(kForward, step), nullptr);
        recorder.record(key(kGradReduce, step));
        recorder.end(number, 0, step % 100 == 0, nullptr);
        lengths += recorder.take_lengths().size();
    }
    recorder.finish(10'000 * kMs);
    lengths += recorder.take_lengths().size();
    std::uint32_t spans = 0;
    std::uint32_t posts = 0;
    const Batch batch = read_batch(*reader_, 1 << 16);
    for (const Item<kRecordWords>& item : batch.records) {
        std::uint32_t& count = kind_of(item) == kForward ? spans : posts;
        EXPECT_EQ(step_of(item), count++);
    }
    EXPECT_EQ(spans, kSpans);
    EXPECT_EQ(posts, kSpans);
    EXPECT_EQ(lengths, kSpans);
    EXPECT_EQ(recorder.dropped(), 0U);
}

TEST_F(DeviceRecorders, AMissingDeviceIsRefused) {
    open(0.0);
    EXPECT_THROW(DeviceRecorder(nullptr, SimulatedDevice::driver(), 3), RingError);
    EXPECT_THROW(static_cast<void>(load_event_driver("libno-such-driver.so")), RingError);
}

}  // namespace
}  // namespace megatronapp::testing
