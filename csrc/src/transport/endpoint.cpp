#include "megatronapp/transport/endpoint.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <limits>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/fork_count.hpp"
#include "megatronapp/transport/connector.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::uint64_t kInlineBytes = 8192;  // copied sooner than another thread is woken
constexpr std::uint32_t kMaxThreads = 64;

Settings checked(Settings settings) {
    if (settings.slots == 0 || settings.slots > kMaxSlots) {
        throw TransportError(std::to_string(settings.slots) + " slots: give 1 to " + std::to_string(kMaxSlots));
    }
    if (settings.slot_bytes == 0 || settings.slot_bytes > kMaxSlotBytes) {
        throw TransportError("slots of " + std::to_string(settings.slot_bytes) + " bytes: give 1 to " +
                             std::to_string(kMaxSlotBytes));
    }
    if (settings.threads == 0 || settings.threads > kMaxThreads) {
        throw TransportError(std::to_string(settings.threads) + " threads: give 1 to " + std::to_string(kMaxThreads));
    }
    if (!(settings.deadline_s > 0)) {
        throw TransportError("a deadline of " + std::to_string(settings.deadline_s) + " s: give more than 0");
    }
    return settings;
}

/// Starts a thread that takes no signals: those are for the threads of the application.
template <typename Function>
std::thread quiet_thread(Function function) {
    sigset_t all{};
    sigset_t before{};
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread(std::move(function));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

[[noreturn]] void raise_timeout(std::uint32_t peer, std::optional<std::uint64_t> key, const char* direction,
                                double seconds) {
    std::ostringstream text;
    text << direction << (std::string(direction) == "send" ? " to rank " : " from rank ") << peer;
    if (key) {
        text << ", key 0x" << std::hex << *key << std::dec;
    } else {
        text << ", entry of a log";
    }
    text << ": nothing within " << seconds << " s; that rank hangs, or the two do not agree on what comes next";
    throw TransferTimeoutError(text.str(), {peer, key, direction, seconds});
}

}  // namespace

class Endpoint::Implementation {
  public:
    explicit Implementation(Settings given)
        : settings(checked(std::move(given))),
          directory(settings.directory, settings.job, settings.attempt),
          connector(directory, settings.rank, settings.slots, settings.slot_bytes, settings.deadline_s),
          board(connector.make_board()) {}

    void connect() {
        peers = connector.connect(board, completions, settings.while_waiting);
        for (std::uint32_t i = 0; i < settings.threads; ++i) {
            threads.push_back(quiet_thread([this, i] { copy_messages(i); }));
        }
        threads.push_back(quiet_thread([this] { examine_peers(); }));
        connected = true;
    }

    [[nodiscard]] const std::shared_ptr<Peer>& peer(std::uint32_t rank) const {
        const auto found =
            std::find_if(peers.begin(), peers.end(), [rank](const auto& entry) { return entry->rank() == rank; });
        if (found == peers.end()) {
            throw TransportError("rank " + std::to_string(rank) + " is not connected; add it as a peer and connect");
        }
        return *found;
    }

    [[nodiscard]] Bell& activity() const noexcept { return board.layout().activity; }
    [[nodiscard]] Bell& credits() const noexcept { return board.layout().credits; }

    /// Takes the result of `attempt` as soon as it has one, or raises TransferTimeoutError.
    template <typename Attempt>
    auto await(std::uint32_t rank, std::optional<std::uint64_t> key, const char* direction, double deadline_s,
               Attempt attempt) {
        const std::uint64_t deadline_ns = deadline_after(deadline_s);
        SliceHook hook(settings.while_waiting);
        while (true) {
            const std::uint32_t seen = activity().count.load(std::memory_order_seq_cst);
            require_open();
            if (auto result = attempt()) {
                return std::move(*result);
            }
            if (monotonic_ns() >= deadline_ns) {
                raise_timeout(rank, key, direction, deadline_s);
            }
            wait(activity(), seen, end_of_slice(deadline_ns));
            hook.call_if_due();
        }
    }

    /// Waits until all followers of the log have read enough for one more entry.
    void await_room(double deadline_s) {
        const std::uint64_t deadline_ns = deadline_after(deadline_s);
        SliceHook hook(settings.while_waiting);
        while (true) {
            const std::uint32_t seen = activity().count.load(std::memory_order_seq_cst);
            require_open();
            const std::optional<std::uint32_t> slowest = board.slowest_follower();
            if (!slowest) {
                return;
            }
            peer(*slowest)->require_well();
            if (monotonic_ns() >= deadline_ns) {
                raise_timeout(*slowest, std::nullopt, "send", deadline_s);
            }
            wait(activity(), seen, end_of_slice(deadline_ns));
            hook.call_if_due();
        }
    }

    void require_open() const {
        if (closed.load(std::memory_order_acquire)) {
            throw TransportError("this endpoint is closed");
        }
    }

    void close(bool drain) {
        const std::lock_guard lock(close_mutex_);
        if (closed.load(std::memory_order_acquire)) {
            return;
        }
        const std::uint64_t deadline_ns = deadline_after(settings.deadline_s);
        while (drain && monotonic_ns() < deadline_ns && sending()) {
            const std::uint32_t seen = drained_.count.load(std::memory_order_seq_cst);
            if (sending()) {
                wait(drained_, seen, end_of_slice(deadline_ns));
            }
        }
        const bool left = drain && sending();
        stop_threads();
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->close();
        }
        board.close();
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->ring_activity();
            directory.remove_names_if_dead(entry->rank());
        }
        connector.remove_names();
        board.file().remove_name();
        require_drained(drain, left);
    }

    const Settings settings;
    const Directory directory;
    Connector connector;
    OwnBoard board;
    Completions completions;
    std::vector<std::shared_ptr<Peer>> peers;  // in the order they were added; unchanged once connected
    std::vector<std::thread> threads;
    std::atomic<bool> connected = false;
    std::atomic<bool> closed = false;
    std::atomic<std::uint64_t> last_ticket = 0;
    std::mutex log_mutex;

  private:
    void copy_messages(std::uint32_t first) {
        std::size_t next = first;
        while (!closed.load(std::memory_order_acquire)) {
            const std::uint32_t seen = credits().count.load(std::memory_order_seq_cst);
            if (!copy_one(next)) {
                wait(credits(), seen, end_of_slice(std::numeric_limits<std::int64_t>::max()));
            }
        }
    }

    /// Copies one message of the next peer that can take one, so that none of them starves; whether there was any.
    bool copy_one(std::size_t& next) {
        for (std::size_t i = 0; i < peers.size(); ++i) {
            Peer& entry = *peers[next++ % peers.size()];
            if (const std::optional<StartedSend> started = entry.start_next(kMaxSlotBytes)) {
                entry.copy(*started);
                ring(drained_);
                return true;
            }
        }
        return false;
    }

    void examine_peers() {
        while (!closed.load(std::memory_order_acquire)) {
            for (const std::shared_ptr<Peer>& entry : peers) {
                if (entry->examine(monotonic_ns())) {
                    directory.remove_names_if_dead(entry->rank());  // it may have died before all had connected
                    ring(activity());
                    ring(drained_);
                }
            }
            wait(stop_, 0, end_of_slice(std::numeric_limits<std::int64_t>::max()));
        }
    }

    [[nodiscard]] bool sending() const {
        return std::any_of(peers.begin(), peers.end(), [](const auto& entry) { return entry->sending(); });
    }

    void stop_threads() {
        closed.store(true, std::memory_order_release);
        ring(stop_);
        ring(credits());
        ring(activity());
        for (std::thread& thread : threads) {
            thread.join();
        }
        threads.clear();
    }

    void require_drained(bool drain, bool left) const {
        if (!drain) {
            return;
        }
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->require_delivered();
        }
        if (left) {
            std::ostringstream text;
            text << "messages were still queued " << settings.deadline_s << " s after the endpoint began to close";
            throw TransportError(text.str());
        }
    }

    std::mutex close_mutex_;
    Bell drained_{};
    Bell stop_{};
};

Endpoint::Endpoint(Settings settings)
    : made_at_fork_(fork_count()), implementation_(std::make_unique<Implementation>(std::move(settings))) {}

Endpoint::~Endpoint() {
    if (in_forked_child()) {
        // Neither threads nor files are those of this process; locks may be held for ever.
        static_cast<void>(implementation_.release());  // NOLINT(bugprone-unused-return-value)
        return;
    }
    try {
        implementation_->close(false);
    } catch (const std::exception&) {
        return;  // only a thread that cannot be joined, which is a defect of this class
    }
}

bool Endpoint::in_forked_child() const noexcept { return fork_count() != made_at_fork_; }

Endpoint::Implementation& Endpoint::open() const {
    if (in_forked_child()) {
        throw TransportError("this endpoint belongs to the process that this one was forked from; make one here");
    }
    implementation_->require_open();
    return *implementation_;
}

const Settings& Endpoint::settings() const noexcept { return implementation_->settings; }

void Endpoint::add_peer(std::uint32_t peer, bool messages) {
    Implementation& self = open();
    if (self.connected.load()) {
        throw TransportError("this endpoint is connected; add all peers before");
    }
    self.connector.add_peer(peer, messages);
}

void Endpoint::connect() {
    Implementation& self = open();
    if (self.connected.load()) {
        throw TransportError("this endpoint is connected already");
    }
    try {
        self.connect();
    } catch (...) {
        self.connector.give_up();
        self.close(false);
        throw;
    }
}

std::uint64_t Endpoint::send(std::uint32_t peer, std::uint64_t key, const std::byte* data, std::uint64_t bytes) {
    Implementation& self = open();
    Peer& receiver = *self.peer(peer);
    const std::uint64_t ticket = self.last_ticket.fetch_add(1, std::memory_order_relaxed) + 1;
    receiver.post({ticket, key, data, bytes, monotonic_ns()});
    if (bytes <= kInlineBytes) {
        if (const std::optional<StartedSend> started = receiver.start_next(kInlineBytes)) {
            receiver.copy(*started);
            if (started->request.ticket == ticket) {
                return ticket;
            }
        }
    }
    ring(self.credits());
    return ticket;
}

void Endpoint::take_completed(std::vector<std::uint64_t>& tickets) {
    if (in_forked_child()) {
        tickets.clear();
        return;
    }
    implementation_->completions.take(tickets);
}

std::optional<Message> Endpoint::poll(std::uint32_t peer, std::uint64_t key) {
    const std::shared_ptr<Peer>& sender = open().peer(peer);
    const std::optional<Arrival> arrival = sender->take(key);
    if (!arrival) {
        return std::nullopt;
    }
    return Message(sender, *arrival, made_at_fork_);
}

Message Endpoint::receive(std::uint32_t peer, std::uint64_t key, double deadline_s) {
    return open().await(peer, key, "receive", deadline_s, [&] { return poll(peer, key); });
}

std::uint32_t Endpoint::activity() const { return open().activity().count.load(std::memory_order_seq_cst); }

bool Endpoint::wait_activity(std::uint32_t seen, double deadline_s) {
    const Implementation& self = open();
    const std::uint64_t deadline_ns = deadline_after(deadline_s);
    SliceHook hook(self.settings.while_waiting);
    while (activity() == seen) {
        if (monotonic_ns() >= deadline_ns) {
            return false;
        }
        wait(self.activity(), seen, end_of_slice(deadline_ns));
        hook.call_if_due();
    }
    return true;
}

void Endpoint::publish(std::uint32_t index, std::uint64_t value) { open().board.publish_word(index, value); }

std::uint64_t Endpoint::read(std::uint32_t peer, std::uint32_t index) { return open().peer(peer)->word(index); }

void Endpoint::lead(const std::vector<std::uint32_t>& followers) {
    Implementation& self = open();
    const std::lock_guard lock(self.log_mutex);
    for (const std::uint32_t follower : followers) {
        static_cast<void>(self.peer(follower));
    }
    self.board.lead(followers);
    for (const std::uint32_t follower : followers) {
        self.peer(follower)->ring_activity();
    }
}

void Endpoint::append(std::uint64_t value, double deadline_s) {
    Implementation& self = open();
    const std::lock_guard lock(self.log_mutex);
    if (self.board.followers().empty()) {
        throw TransportError("this rank leads no log; name its followers first");
    }
    for (const FollowerState& follower : self.board.followers()) {
        self.peer(follower.rank)->require_well();
    }
    self.await_room(deadline_s);
    self.board.append(value);
    for (const FollowerState& follower : self.board.followers()) {
        self.peer(follower.rank)->ring_activity();
    }
}

std::optional<std::uint64_t> Endpoint::poll_entry(std::uint32_t leader) {
    Peer& peer = *open().peer(leader);
    const std::optional<std::uint64_t> entry = peer.next_entry();
    if (entry) {
        peer.ring_activity();
    }
    return entry;
}

std::uint64_t Endpoint::next_entry(std::uint32_t leader, double deadline_s) {
    return open().await(leader, std::nullopt, "receive", deadline_s, [&] { return poll_entry(leader); });
}

PeerStatistics Endpoint::statistics(std::uint32_t peer) { return open().peer(peer)->statistics(); }

void Endpoint::close(bool drain) {
    if (!in_forked_child()) {
        implementation_->close(drain);
    }
}

}  // namespace megatronapp::transport
