#include "megatronapp/transport/endpoint.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/fork_count.hpp"
#include "megatronapp/quiet_threads.hpp"
#include "megatronapp/transport/connector.hpp"
#include "megatronapp/transport/cuda/cuda_board.hpp"
#include "megatronapp/transport/cuda/staged_path.hpp"
#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/ucx/network_path.hpp"
#include "megatronapp/transport/ucx/worker.hpp"

namespace megatronapp::transport {
namespace {

constexpr std::uint64_t kInlineBytes = 8192;  // copied sooner than another thread is woken

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
          device(device_of(settings)),
          directory(settings.directory, settings.job, settings.attempt),
          connector(directory, settings, device),
          board(connector.make_board()) {
        if (device != nullptr) {
            board_on_device.emplace(device, board);
        }
    }

    std::vector<std::byte> open_network(const std::string& library, const std::string& devices) {
        if (network) {
            throw TransportError("the network of this endpoint is open already");
        }
        network = std::make_shared<ucx::Worker>(ucx::WorkerSettings{
            .library = library,
            .devices = devices,
            .self = {.rank = settings.rank, .job = hash_of(settings.job), .attempt = settings.attempt},
            .deadline_s = settings.deadline_s,
            .board = &board.layout()});
        return network->address();
    }

    void add_remote_peer(std::uint32_t peer, bool messages, std::vector<std::byte> address) {
        const auto is_peer = [peer](const auto& link) { return link->peer() == peer; };
        if (!network || peer == settings.rank || std::any_of(links.begin(), links.end(), is_peer)) {
            throw TransportError("rank " + std::to_string(peer) +
                                 " is this rank, was added before, or the network is not open");
        }
        const ucx::Hello own = messages ? ucx::Hello{settings.slots, settings.slot_bytes} : ucx::Hello{};
        links.push_back(network->add(peer, std::move(address), own));
    }

    void connect() {
        if (network) {
            network->start();  // so that peers on other nodes hear if this rank gives up
        }
        peers = connector.connect(board, completions, settings.while_waiting);
        if (network) {
            network->await_connected(settings.while_waiting);
        }
        for (const std::shared_ptr<ucx::Link>& link : links) {
            std::unique_ptr<Path> path =
                staged(device, std::make_unique<ucx::NetworkPath>(network, link), link->peer(), nullptr);
            peers.push_back(std::make_shared<Peer>(settings.rank, link->peer(), settings.deadline_s, std::move(path),
                                                   std::make_unique<ucx::NetworkBoard>(network, link), completions));
        }
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
            const std::uint32_t seen = completions.added().count.load(std::memory_order_seq_cst);
            if (sending()) {
                wait(completions.added(), seen, end_of_slice(deadline_ns));
            }
        }
        const bool left = drain && sending();
        stop_threads();
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->abandon();
        }
        board.close();  // before the waits below: peers need not wait for what does not come
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->close();
        }
        if (network) {
            network->stop();
        }
        for (const std::shared_ptr<Peer>& entry : peers) {
            entry->ring_activity();
            directory.remove_names_if_dead(entry->rank());
        }
        connector.remove_names();
        board.file().remove_name();
        require_drained(drain, left);
    }

    const Settings settings;
    const cuda::SharedDevice device;
    const Directory directory;
    Connector connector;
    OwnBoard board;
    std::optional<BoardOnDevice> board_on_device;
    Completions completions;
    std::shared_ptr<ucx::Worker> network;  // none without peers on other nodes
    std::vector<std::shared_ptr<ucx::Link>> links;
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
                    ring(completions.added());
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

std::vector<std::byte> Endpoint::open_network(const std::string& library, const std::string& devices) {
    return open().open_network(library, devices);
}

void Endpoint::add_remote_peer(std::uint32_t peer, bool messages, std::vector<std::byte> address) {
    Implementation& self = open();
    if (self.connected.load()) {
        throw TransportError("this endpoint is connected; add all peers before");
    }
    self.add_remote_peer(peer, messages, std::move(address));
}

std::optional<std::uint64_t> Endpoint::round_trip_ns(std::uint32_t peer) const {
    for (const std::shared_ptr<ucx::Link>& link : open().links) {
        if (link->peer() == peer) {
            return link->round_trip_ns();
        }
    }
    return std::nullopt;
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

std::uint64_t Endpoint::send(std::uint32_t peer, std::uint64_t key, const std::byte* data, std::uint64_t bytes,
                             std::optional<DeviceStream> stream) {
    return post(peer, key, MessageSource(data, bytes), bytes, stream);
}

std::uint64_t Endpoint::send_parts(std::uint32_t peer, std::uint64_t key, std::vector<MessagePart> parts,
                                   std::uint64_t bytes, std::optional<DeviceStream> stream) {
    return post(peer, key, MessageSource::gathered(std::move(parts), bytes), bytes, stream);
}

std::uint64_t Endpoint::post(std::uint32_t peer, std::uint64_t key, MessageSource source, std::uint64_t bytes,
                             std::optional<DeviceStream> stream) {
    Implementation& self = open();
    Peer& receiver = *self.peer(peer);
    const std::uint64_t ticket = self.last_ticket.fetch_add(1, std::memory_order_relaxed) + 1;
    receiver.post({ticket, key, std::move(source), bytes, monotonic_ns()}, stream);
    const std::uint64_t inline_bytes = receiver.starts_at_once() ? kMaxSlotBytes : kInlineBytes;
    if (bytes <= inline_bytes) {
        if (const std::optional<StartedSend> started = receiver.start_next(inline_bytes)) {
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

std::vector<std::uint64_t> Endpoint::posted(std::uint32_t peer) { return open().peer(peer)->posted(); }

std::optional<Message> Endpoint::take(std::uint32_t peer, std::uint64_t key, bool posted) {
    const std::shared_ptr<Peer>& sender = open().peer(peer);
    const std::optional<Arrival> arrival = sender->take(key, posted);
    if (!arrival) {
        return std::nullopt;
    }
    return Message(sender, *arrival, made_at_fork_);
}

std::vector<Message> Endpoint::take_arrived(const std::vector<std::uint32_t>& peers) {
    const Implementation& self = open();
    std::vector<Message> messages;
    std::vector<Arrival> arrivals;
    for (const std::uint32_t rank : peers) {
        const std::shared_ptr<Peer>& sender = self.peer(rank);
        arrivals.clear();
        sender->take_all(arrivals);
        for (const Arrival& arrival : arrivals) {
            messages.emplace_back(sender, arrival, made_at_fork_);
        }
    }
    if (messages.empty()) {
        for (const std::uint32_t rank : peers) {
            self.peer(rank)->require_well();
        }
    }
    return messages;
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

void Endpoint::publish(std::uint32_t index, std::uint64_t value) {
    Implementation& self = open();
    self.board.publish_word(index, value);
    for (const std::shared_ptr<Peer>& entry : self.peers) {
        entry->word_published(index, value);
    }
}

void Endpoint::publish_after(DeviceStream stream, std::uint32_t index, std::uint64_t value) {
    Implementation& self = open();
    if (!self.board_on_device || self.network) {
        throw TransportError("progress in the order of a stream needs a device, and all peers on its node");
    }
    self.board_on_device->publish_after(stream, self.board.word(index), value);
}

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
        self.peer(follower.rank)->entry_appended(value);
        self.peer(follower.rank)->ring_activity();
    }
}

std::optional<std::uint64_t> Endpoint::poll_entry(std::uint32_t leader) { return open().peer(leader)->next_entry(); }

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
