/// Log of the operations of NCCL in this process, with the times at which their kernels moved data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace megatronapp::nccl {

/// Numbers are part of what the reader of the log knows.
enum class Operation : std::uint32_t {
    kOther = 0,
    kAllReduce = 1,
    kReduceScatter = 2,
    kAllGather = 3,
    kBroadcast = 4,
    kReduce = 5,
    kSend = 6,
    kReceive = 7,
};

/// A finished operation: 64 bytes, read by NumPy.
struct Transfer {
    std::uint64_t communicator;  // the hash that NCCL gives it, equal on all its ranks
    std::uint64_t bytes;
    std::uint64_t device_start_ns;  // global timer of the device when the first channel began
    std::uint64_t device_end_ns;    // and when the last one had ended
    std::uint64_t seen_ns;          // monotonic clock of the host when the end was seen
    std::uint32_t sequence;         // n-th operation of this kind and peer in the communicator, from 0
    Operation operation;
    std::int32_t peer;  // rank in the communicator that a send or receive is with; else -1
    std::int32_t ranks;
    std::int32_t rank;  // this rank in the communicator
    std::uint32_t channels;
};
static_assert(sizeof(Transfer) == 64);

class TransferLog;

/// A communicator as NCCL has announced it.
struct Communicator {
    TransferLog* log;
    std::uint64_t hash;
    std::int32_t ranks;
    std::int32_t rank;
    /// Operations so far; of sends and receives one count for each peer. Used by the thread that enqueues.
    std::array<std::uint32_t, 8> collectives{};
    std::vector<std::uint32_t> sent;
    std::vector<std::uint32_t> received;
};

/// All of its functions may be called from any thread; the lock that they share is held for moments.
///
/// NCCL reports the channels of kernels from a thread of its own, late on a busy host. Before 2.31 it also misses some:
/// a kernel that begins and ends between two looks of that thread is reported without its begin, and with the handle of
/// a channel that has ended before. Such a channel is not counted, and the operation is finished without it.
class TransferLog {
  public:
    /// What NCCL gets as its handle of an event.
    struct Handle {
        explicit Handle(bool channel) noexcept : is_channel(channel) {}
        const bool is_channel;
        bool used{false};
    };

    /// An operation between its enqueuing and the end of its last kernel.
    struct Pending : Handle {
        Pending() noexcept : Handle(false) {}
        bool is_enqueued{false};
        bool is_counted{true};      // NCCL has announced how many channels there will be
        std::uint32_t awaited{0};   // channels that were announced and have not begun
        std::uint32_t open{0};      // channels that have begun and not ended
        std::uint64_t begun_ns{0};  // host time of its enqueuing
        std::uint64_t ended_ns{0};  // host time of the newest end of a channel
        Transfer transfer{};
        std::list<Pending>::iterator place;
    };

    /// The part of an operation that one channel moves.
    struct Channel : Handle {
        Channel() noexcept : Handle(true) {}
        Pending* pending{nullptr};
        std::uint64_t end_ns{0};
    };

    /// How long to wait for reports of NCCL.
    struct Patience {
        std::uint64_t quiet_ns = 20'000'000;       // after the end of a channel, where their number is not announced
        std::uint64_t missing_ns = 1'000'000'000;  // after the end of a channel, where announced ones are missing
        std::uint64_t expire_ns = 60'000'000'000;  // after the enqueuing, where no channel has begun
    };

    TransferLog(std::size_t pending, std::size_t finished);

    /// Returns null, and counts the operation as dropped, where too many are pending.
    Pending* begin(Communicator& communicator, Operation operation, std::uint64_t bytes, std::int32_t peer,
                   std::uint32_t channels) noexcept;
    /// Its enqueuing has ended; channels may still begin and end.
    void enqueued(Pending& pending) noexcept;
    Channel* begin_channel(Pending& pending, std::uint64_t start_ns) noexcept;
    /// Notes the time of the device at which a channel ends, before `end_channel`.
    void channel_ends_at(Channel& channel, std::uint64_t end_ns) noexcept;
    /// Does nothing for a channel that has ended.
    void end_channel(Channel& channel) noexcept;

    /// Copies finished operations to `out`, oldest first, and returns their number. NCCL does not say how many channels
    /// a send or receive has: one is finished once it has been quiet after the end of a channel. Those of which no
    /// channel has begun for long, as in a CUDA graph that captures them, are dropped.
    std::size_t take(std::span<Transfer> out, const Patience& patience);
    std::size_t take(std::span<Transfer> out) { return take(out, Patience{}); }
    /// Returns the communicator of the newest operation of this size among the last ones that were enqueued.
    [[nodiscard]] std::optional<std::uint64_t> communicator_of(std::uint64_t bytes) const;
    /// Returns how many operations are enqueued and not finished.
    [[nodiscard]] std::size_t in_flight() const;
    [[nodiscard]] std::uint64_t dropped() const;

  private:
    struct Begun {
        std::uint64_t bytes;
        std::uint64_t communicator;
    };

    // These are called with the lock.
    void finish_if_complete(Pending& pending) noexcept;
    void finish(Pending& pending, std::uint64_t seen_ns) noexcept;
    void sweep(const Patience& patience) noexcept;

    mutable std::mutex mutex_;
    std::list<Pending> free_;
    std::list<Pending> in_flight_;  // in the order of their enqueuing
    std::vector<Channel> channels_;
    std::uint64_t next_channel_{0};
    std::array<Begun, 64> begun_{};
    std::uint64_t num_begun_{0};
    std::uint64_t dropped_{0};
    std::vector<Transfer> finished_;
    std::size_t most_finished_;
};

}  // namespace megatronapp::nccl
