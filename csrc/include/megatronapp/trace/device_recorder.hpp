#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "megatronapp/clock.hpp"
#include "megatronapp/ring_writer.hpp"
#include "megatronapp/trace/device_clock.hpp"
#include "megatronapp/trace/event_driver.hpp"
#include "megatronapp/trace/spsc_queue.hpp"

namespace megatronapp {

/// Length of a span on the device, for the thread that recorded it.
struct DeviceLength {
    std::uint8_t kind;
    std::uint8_t flags;
    std::uint64_t duration_ns;
};

/// Records spans of a CUDA stream with pooled events.
///
/// The training thread records an event where a span begins and one where it ends, and never waits. The harvest thread
/// polls the oldest event that has not been passed, converts times with a DeviceClock, writes the records and publishes
/// the span that the device is inside of; so that this is known also while the training thread is stuck in a wait for
/// the device. Events are recorded in the stream that computes: timing events in streams that communicate would break
/// the overlap that Megatron relies on where CUDA_DEVICE_MAX_CONNECTIONS is 1.
///
/// With a harvest thread it is the only producer of records of its ring: the training thread's go through a queue.
class DeviceRecorder {
  public:
    using HostClock = std::uint64_t (*)();

    /// Spans between two readings of their events; beyond it, spans are dropped and counted.
    static constexpr std::size_t kMostPending = 32768;
    static constexpr std::size_t kMostOpen = 256;  ///< slots for ends of spans that have begun
    static constexpr std::uint64_t kAnchorSpinNs = 20'000;
    static constexpr double kGoodUncertaintyNs = 15'000;
    /// For how long an event that was passed waits for bounds that are good enough.
    static constexpr std::int64_t kLongestHoldNs = 2'000'000'000;

    /// Reads the clocks; waits for the device, before training. A null `ring` drops all records. Raises RingError if a
    /// function of the driver fails.
    DeviceRecorder(RingWriter* ring, const EventDriver& driver, int device, HostClock now_ns = monotonic_ns);
    DeviceRecorder(const DeviceRecorder&) = delete;
    DeviceRecorder& operator=(const DeviceRecorder&) = delete;
    DeviceRecorder(DeviceRecorder&&) = delete;
    DeviceRecorder& operator=(DeviceRecorder&&) = delete;
    ~DeviceRecorder();

    /// Starts the harvest thread; without it, `harvest` has to be called.
    void start();

    // Of the training thread; none of them blocks.

    /// Queues a record of the host.
    void record(const Span& span) noexcept;
    /// Begins a span, whose times and `aux` follow from the events. Returns its number, 0 if it was dropped.
    [[nodiscard]] std::uint64_t begin(const Span& span, DeviceStream stream) noexcept;
    /// Ends a span; `flags` are added to its flags. An anchor is an end at which the host has just waited for the
    /// device: its event is polled for at most kAnchorSpinNs, which ties the two clocks together.
    void end(std::uint64_t number, std::uint8_t flags, bool is_anchor, DeviceStream stream) noexcept;
    /// Records a span without a length, at the time at which the stream gets there.
    void mark(const Span& span, DeviceStream stream) noexcept;
    /// Lengths of spans that were read since the last call.
    [[nodiscard]] std::vector<DeviceLength> take_lengths();
    /// Stops the harvest thread, after at most `timeout_ns` for the events that have not been passed.
    void finish(std::uint64_t timeout_ns);

    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }
    /// The failure of the driver because of which nothing more is recorded; empty without one.
    [[nodiscard]] std::string failure() const;
    /// By how many ns the newest time that was converted may be wrong.
    [[nodiscard]] double uncertainty_ns() const noexcept { return uncertainty_ns_.load(std::memory_order_relaxed); }

    /// Reads what has been passed. Returns whether anything had.
    bool harvest(bool is_last = false);

  private:
    enum class Mark : std::uint8_t { kBegin, kEnd, kPoint };

    struct Entry {
        DeviceEvent event;
        std::uint64_t recorded_ns;
        std::uint64_t seen_ns;  ///< 0 if the training thread did not see it passed
        std::uint64_t number;
        Span span;  ///< of an end, its flags alone
        Mark mark;
    };
    struct Passed {
        Entry entry;
        std::int64_t device_ns;
    };
    struct Open {
        std::uint64_t number;
        Span span;
    };

    [[nodiscard]] DeviceEvent recorded_event(DeviceStream stream) noexcept;
    [[nodiscard]] bool is_passed(DeviceEvent event, bool& failed) noexcept;
    [[nodiscard]] bool in_forked_child() const noexcept;
    void calibrate();
    void run();
    bool read_host_records() noexcept;
    bool read_events();
    [[nodiscard]] std::int64_t device_ns_of(DeviceEvent event);
    void give_back(DeviceEvent event) noexcept;
    void follow(const Passed& passed);
    void show_position() noexcept;
    void convert(bool is_last);
    void convert_one(const Passed& passed);
    void write(const Span& span) noexcept;
    void fail(const char* function, int code) noexcept;

    RingWriter* ring_;
    EventDriver driver_;
    int device_ = 0;
    DeviceContext context_ = nullptr;
    HostClock now_ns_;
    std::uint64_t made_at_fork_;

    // Between the threads.
    SpscQueue<Entry> entries_;
    SpscQueue<DeviceEvent> free_events_;
    SpscQueue<Span> host_records_;
    SpscQueue<DeviceLength> lengths_;
    std::atomic<std::uint64_t> dropped_ = 0;
    std::atomic<double> uncertainty_ns_ = 0;
    std::atomic<const char*> failed_function_ = nullptr;
    std::atomic<int> failed_code_ = 0;
    std::atomic<bool> is_ending_ = false;
    std::atomic<std::uint64_t> end_before_ns_ = 0;

    // Of the training thread.
    std::uint64_t numbers_ = 0;
    std::thread thread_;

    // Of the harvest thread.
    std::deque<Passed> passed_;     ///< in the order of the stream, not yet converted
    std::vector<Open> open_;        ///< begun, by conversion
    std::vector<OpenSpan> inside_;  ///< begun, by the device
    std::vector<std::uint64_t> inside_numbers_;
    std::optional<OpenSpan> shown_;
    DeviceClock clock_;
    DeviceEvent reference_ = nullptr;
    std::int64_t reference_ns_ = 0;
    std::int64_t newest_ns_ = 0;
    std::int64_t last_host_ns_ = 0;
};

}  // namespace megatronapp
