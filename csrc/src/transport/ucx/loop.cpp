#include "megatronapp/transport/ucx/loop.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "megatronapp/clock.hpp"
#include "megatronapp/transport/errors.hpp"

namespace megatronapp::transport::ucx {
namespace {

constexpr unsigned kMessageId = 1;
constexpr int kRoundsOfProgress = 16;
constexpr std::uint64_t kRendezvousBytes = 65536;  // from here on a message goes into its slot without a copy there
constexpr double kMostBeatS = 1.0;
constexpr double kBeatsInDeadline = 8.0;
constexpr std::uint64_t kFarewellNs = 1'000'000'000;
constexpr std::uint64_t kCloseNs = 2'000'000'000;

}  // namespace

void Loop::add(std::shared_ptr<Link> link, std::vector<std::byte> address) {
    auto connection = std::make_unique<Connection>();
    connection->loop = this;
    connection->link = std::move(link);
    connection->address = std::move(address);
    connections_.push_back(std::move(connection));
}

Loop::Connection* Loop::find(std::uint32_t peer) noexcept {
    const auto found = std::find_if(connections_.begin(), connections_.end(),
                                    [peer](const auto& entry) { return entry->link->peer() == peer; });
    return found == connections_.end() ? nullptr : found->get();
}

Loop::Operation& Loop::operation(Connection& connection) {
    if (free_.empty()) {
        free_.push_back(&operations_.emplace_back());
    }
    Operation& operation = *free_.back();
    free_.pop_back();
    operation = {};
    operation.connection = &connection;
    ++connection.operations;
    return operation;
}

void Loop::start() {
    const HandlerParams handler{.field_mask = kHandlerId | kHandlerCallback | kHandlerArgument,
                                .id = kMessageId,
                                .flags = 0,
                                .callback = &Loop::on_message,
                                .argument = this};
    const Status status = library_->worker_set_am_recv_handler(worker_, &handler);
    for (const auto& connection : connections_) {
        if (status != Status::kOk) {
            broken(*connection, status);
            continue;
        }
        connection->heard_ns = monotonic_ns();
        make_endpoint(*connection);
        const Hello& own = connection->link->own();
        tell(*connection, Kind::kHello, body_of(own));
        beat(*connection, true);
    }
}

void Loop::make_endpoint(Connection& connection) {
    const EndpointParams params{
        .field_mask = kEndpointAddress | kEndpointErrorMode | kEndpointErrorHandler,
        .address = reinterpret_cast<const AddressHandle*>(connection.address.data()),
        .error_mode = ErrorMode::kPeer,
        .error_handler = {&Loop::on_error, &connection},
        .user_data = nullptr,
        .flags = 0,
        .socket_address = {},
    };
    const Status status = library_->ep_create(worker_, &params, &connection.endpoint);
    if (status != Status::kOk) {
        connection.endpoint = nullptr;
        broken(connection, status);
    }
}

void Loop::broken(Connection& connection, Status status) {
    connection.broken = true;
    connection.link->lost(std::string("died or is unreachable (UCX: ") + library_->status_string(status) +
                          "); its own log says which");
    ring(board_->activity);
    ring(board_->credits);
}

void Loop::on_error(void* argument, EndpointHandle* /*endpoint*/, Status status) {
    auto* connection = static_cast<Connection*>(argument);
    connection->loop->broken(*connection, status);
}

void Loop::carry_out(const Order& order) {
    Connection* connection = find(order.peer);
    if (order.task == Order::Task::kSend) {
        send(*connection, order.started, *order.sink);
    } else if (order.task == Order::Task::kTell) {
        tell(*connection, order.kind, order.body);
    } else {
        leave(*connection);
    }
}

void Loop::tell(Connection& connection, Kind kind, const Body& body) {
    if (connection.broken || connection.stage != Stage::kOpen) {
        return;
    }
    Operation& order = operation(connection);
    order.kind = kind;
    post(order, body, kSendEager);
}

void Loop::send(Connection& connection, const StartedSend& started, CopySink& sink) {
    if (connection.broken || connection.stage != Stage::kOpen) {
        connection.link->lost("is not connected any more");
        sink.failed(started, "rank " + std::to_string(connection.link->peer()) + " is not connected any more");
        return;
    }
    Operation& order = operation(connection);
    order.kind = Kind::kMessage;
    order.started = started;
    order.sink = &sink;
    order.arrival.start_ns = started.start_ns != 0 ? started.start_ns : monotonic_ns();
    const SendRequest& request = started.request;
    post(order,
         body_of(MessageNews{request.key, request.bytes, started.slot, order.arrival.start_ns, request.queued_ns}),
         request.bytes >= kRendezvousBytes ? kSendRendezvous : kSendEager);
}

void Loop::post(Operation& operation, const Body& body, std::uint32_t flags) {
    Connection& connection = *operation.connection;
    operation.header = encode({.kind = operation.kind,
                               .sender = self_.rank,
                               .receiver = connection.link->peer(),
                               .job = self_.job,
                               .attempt = self_.attempt,
                               .number = connection.numbers++,
                               .body = body});
    RequestParams params{};
    params.attributes = kOperationCallback | kOperationUserData | kOperationFlags | kOperationMemoryType;
    params.flags = flags;
    params.callback.send = &Loop::on_sent;
    params.user_data = &operation;
    params.memory_type = MemoryType::kHost;
    operation.data = MessageData(operation.started.request, params);
    void* pending =
        library_->am_send_nbx(connection.endpoint, kMessageId, operation.header.data(), operation.header.size(),
                              operation.data.buffer(), operation.data.count(), &params);
    if (pending == nullptr || is_error(pending)) {
        sent(operation, status_of(pending));
    }
}

void Loop::on_sent(void* request, Status status, void* user_data) {
    auto* operation = static_cast<Operation*>(user_data);
    Loop& loop = *operation->connection->loop;
    loop.sent(*operation, status);
    loop.library_->request_free(request);
}

void Loop::sent(Operation& operation, Status status) {
    Connection& connection = *operation.connection;
    const Operation ended = std::exchange(operation, {});
    free_.push_back(&operation);
    --connection.operations;
    if (status != Status::kOk && !connection.link->failed()) {
        broken(connection, status);
    }
    if (ended.kind == Kind::kBeat) {
        --connection.beats_out;
    }
    if (ended.sink == nullptr) {
        return;
    }
    if (status == Status::kOk) {
        ++connection.delivered;
        ended.sink->completed(ended.started, ended.arrival.start_ns, monotonic_ns());
    } else {
        ended.sink->failed(ended.started,
                           "rank " + std::to_string(connection.link->peer()) + " " + connection.link->how_lost());
    }
}

void Loop::beat(Connection& connection, bool wants_reply) {
    connection.beat_ns = monotonic_ns();
    const std::uint64_t held_ns = connection.peer_beat_ns == 0 ? 0 : connection.beat_ns - connection.got_beat_ns;
    const Beat contents{connection.beat_ns, connection.peer_beat_ns, held_ns, wants_reply};
    if (!connection.broken && connection.stage < Stage::kClosing) {
        ++connection.beats_out;
        Operation& order = operation(connection);
        order.kind = Kind::kBeat;
        post(order, body_of(contents), kSendEager);
    }
}

bool Loop::progress() {
    bool happened = false;
    for (int i = 0; i < kRoundsOfProgress && library_->worker_progress(worker_) != 0; ++i) {
        happened = true;
    }
    return happened;
}

Status Loop::on_message(void* argument, const void* header, std::size_t header_length, void* data, std::size_t length,
                        const ReceivedParams* params) {
    Loop& loop = *static_cast<Loop*>(argument);
    const Decoded decoded = decode({static_cast<const std::byte*>(header), header_length}, loop.self_);
    if (!decoded.header) {
        loop.rejected(decoded);
        return Status::kOk;
    }
    return loop.dispatch(*decoded.header, data, length, (params->attributes & kReceivedRendezvous) != 0);
}

/// What any program can send is ignored. What only this transport writes ends the job: it is not known who wrote it.
void Loop::rejected(const Decoded& decoded) {
    if (decoded.rejection == Rejection::kForeign) {
        return;
    }
    for (const auto& connection : connections_) {
        if (decoded.rejection == Rejection::kVersion) {
            connection->link->mismatched("a rank has version " + std::to_string(decoded.version) +
                                         " of the messages between nodes, this rank " + std::to_string(kWireVersion) +
                                         "; install the same megatronapp-native on all ranks");
        } else {
            connection->link->damaged("or another rank sent a header with a wrong check");
        }
    }
    ring(board_->activity);
}

Status Loop::dispatch(const Header& header, void* data, std::size_t length, bool rendezvous) {
    Connection* connection = find(header.sender);
    if (connection == nullptr || connection->link->failed()) {
        return Status::kOk;
    }
    connection->heard_ns = monotonic_ns();
    Status status = Status::kOk;
    if (header.kind == Kind::kMessage) {
        status = message(*connection, header, data, length, rendezvous);
    } else if (length != 0) {
        connection->link->damaged("data with a header that has none");
    } else {
        news(*connection, header);
    }
    if (connection->link->failed()) {
        ring(board_->activity);
    }
    return status;
}

Status Loop::message(Connection& connection, const Header& header, void* data, std::size_t length, bool rendezvous) {
    Link& link = *connection.link;
    const Parsed<MessageNews> parsed = parse_message(header.body, length, link.own());
    if (!parsed.value) {
        link.damaged(parsed.wrong);
        return Status::kOk;
    }
    const MessageNews& message = *parsed.value;
    if (!link.reserve(message.slot)) {
        return Status::kOk;
    }
    const Arrival arrival{message.key,      message.bytes,  message.slot,
                          message.start_ns, monotonic_ns(), message.queued_ns};
    if (!rendezvous) {
        if (length != 0) {
            std::memcpy(link.slot_data(message.slot), data, length);
        }
        land(connection, arrival);
        return Status::kOk;
    }
    Operation& order = operation(connection);
    order.kind = Kind::kMessage;
    order.arrival = arrival;
    RequestParams params{};
    params.attributes = kOperationCallback | kOperationUserData | kOperationMemoryType;
    params.callback.receive = &Loop::on_received;
    params.user_data = &order;
    params.memory_type = MemoryType::kHost;
    void* pending = library_->am_recv_data_nbx(worker_, data, link.slot_data(message.slot), length, &params);
    if (pending == nullptr || is_error(pending)) {
        received(order, status_of(pending));
    }
    return Status::kOk;
}

void Loop::on_received(void* request, Status status, std::size_t /*length*/, void* user_data) {
    auto* operation = static_cast<Operation*>(user_data);
    Loop& loop = *operation->connection->loop;
    loop.received(*operation, status);
    loop.library_->request_free(request);
}

void Loop::received(Operation& operation, Status status) {
    Connection& connection = *operation.connection;
    const Arrival arrival = operation.arrival;
    operation.connection = nullptr;
    free_.push_back(&operation);
    --connection.operations;
    connection.heard_ns = monotonic_ns();
    if (status == Status::kOk) {
        land(connection, arrival);
    } else if (!connection.link->failed()) {
        broken(connection, status);
    }
}

/// Gives the message its times on this rank's clock: it cannot have begun after its header arrived.
void Loop::land(Connection& connection, Arrival arrival) {
    const std::uint64_t header_ns = arrival.end_ns;
    arrival.end_ns = monotonic_ns();
    arrival.start_ns = connection.clock.own_time(arrival.start_ns, header_ns).value_or(header_ns);
    arrival.queued_ns = connection.clock.own_time(arrival.queued_ns, arrival.start_ns).value_or(arrival.start_ns);
    connection.link->landed(arrival);
    ring(board_->activity);
}

void Loop::news(Connection& connection, const Header& header) {
    Link& link = *connection.link;
    const auto use = [&link](const auto& parsed, const auto& function) {
        if (parsed.value) {
            function(*parsed.value);
        } else {
            link.damaged(parsed.wrong);
        }
    };
    switch (header.kind) {
        case Kind::kHello:
            use(parse_hello(header.body), [&](const Hello& hello) { link.greeted(hello); });
            break;
        case Kind::kReturned:
            use(parse_returned(header.body, link.own().slots), [&](std::uint32_t slot) { link.returned(slot); });
            ring(board_->credits);
            return;
        case Kind::kWord:
            use(parse_word(header.body), [&](const WordNews& word) { link.word(word, header.number); });
            return;
        case Kind::kBeat:
            beaten(connection, header);
            return;
        case Kind::kClosing:
            use(parse_closing(header.body), [&](const Closing& closing) { link.closing(closing); });
            break;
        default:
            log_news(connection, header);
            break;
    }
    ring(board_->activity);
}

void Loop::log_news(Connection& connection, const Header& header) {
    Link& link = *connection.link;
    if (header.kind == Kind::kEntry) {
        const Parsed<EntryNews> entry = parse_entry(header.body, link.entries_read());
        if (entry.value) {
            link.entry(*entry.value);
        } else {
            link.damaged(entry.wrong);
        }
        return;
    }
    for (Follower& follower : board_->followers) {
        if (follower.rank.load(std::memory_order_acquire) == std::uint64_t{link.peer()} + 1) {
            const Parsed<std::uint64_t> read =
                parse_read(header.body, 0, board_->log_count.load(std::memory_order_acquire));
            if (read.value) {
                follower.cursor.store(std::max(*read.value, follower.cursor.load(std::memory_order_relaxed)),
                                      std::memory_order_release);
            } else {
                link.damaged(read.wrong);
            }
            return;
        }
    }
    link.damaged("its place in a log that it does not follow");
}

void Loop::beaten(Connection& connection, const Header& header) {
    const std::uint64_t now_ns = monotonic_ns();
    const Parsed<Beat> parsed = parse_beat(header.body, now_ns);
    if (!parsed.value) {
        connection.link->damaged(parsed.wrong);
        return;
    }
    const Beat& beat_news = *parsed.value;
    connection.peer_beat_ns = beat_news.sent_ns;
    connection.got_beat_ns = now_ns;
    if (connection.left_ns != 0 && beat_news.echo_ns >= connection.left_ns) {
        connection.stage_until_ns = now_ns;  // the peer has all that was sent before
    }
    if (beat_news.echo_ns != 0) {
        const std::uint64_t round_trip_ns = now_ns - beat_news.echo_ns - beat_news.held_ns;
        connection.clock.measured(beat_news.sent_ns, now_ns, round_trip_ns);
        if (connection.link->measured(round_trip_ns)) {
            ring(board_->activity);
        }
    }
    if (beat_news.wants_reply) {
        beat(connection, connection.link->round_trip_wanted());
    }
}

void Loop::examine(std::uint64_t now_ns) {
    const double beat_s = std::min(kMostBeatS, deadline_s_ / kBeatsInDeadline);
    for (const auto& entry : connections_) {
        Connection& connection = *entry;
        if (connection.stage != Stage::kOpen) {
            advance(connection, now_ns);
            continue;
        }
        const std::uint64_t silent_ns = now_ns - std::min(now_ns, connection.heard_ns);
        const bool connected = !connection.link->round_trip_wanted();  // before, the deadline of connecting holds
        if (connected && static_cast<double>(silent_ns) > deadline_s_ / 2 * 1e9 && !connection.link->failed()) {
            std::ostringstream text;
            text << "is stopped or unreachable: nothing was heard of it for " << deadline_s_ / 2
                 << " s; check the network between the nodes, and that rank's own log";
            connection.link->lost(text.str());
            ring(board_->activity);
            ring(board_->credits);
        } else if (static_cast<double>(now_ns - connection.beat_ns) > beat_s * 1e9 && connection.beats_out == 0) {
            beat(connection, connection.link->round_trip_wanted());
        }
    }
}

void Loop::leave(Connection& connection) {
    if (connection.stage != Stage::kOpen) {
        return;
    }
    const std::uint64_t now_ns = monotonic_ns();
    if (connection.endpoint == nullptr) {
        return end(connection);
    }
    if (connection.broken || connection.link->failed()) {
        return close(connection, now_ns);
    }
    tell(connection, Kind::kClosing, body_of(Closing{connection.delivered}));
    beat(connection, true);
    connection.left_ns = connection.beat_ns;
    connection.stage = Stage::kLeaving;
    connection.stage_until_ns = now_ns + kFarewellNs;
}

void Loop::leave_all() {
    for (const auto& connection : connections_) {
        leave(*connection);
    }
}

void Loop::close(Connection& connection, std::uint64_t now_ns) {
    RequestParams params{};
    params.attributes = kOperationFlags;
    params.flags = kCloseForce;
    connection.stage = Stage::kClosing;
    connection.stage_until_ns = now_ns + kCloseNs;
    connection.close_request = library_->ep_close_nbx(connection.endpoint, &params);
    if (is_error(connection.close_request)) {
        connection.close_request = nullptr;
    }
}

void Loop::advance(Connection& connection, std::uint64_t now_ns) {
    const bool late = now_ns >= connection.stage_until_ns;
    if (connection.stage == Stage::kLeaving && (late || connection.broken)) {
        close(connection, now_ns);
    } else if (connection.stage == Stage::kClosing) {
        void*& request = connection.close_request;
        if (request != nullptr && library_->request_check_status(request) != Status::kInProgress) {
            library_->request_free(std::exchange(request, nullptr));
        }
        if (late || (request == nullptr && connection.operations == 0)) {
            end(connection);
        }
    }
}

/// Reports what UCX has not ended, so that nobody waits for it or calls a sink that is gone.
void Loop::end(Connection& connection) {
    connection.stage = Stage::kEnded;
    for (Operation& pending : operations_) {
        if (pending.connection == &connection && pending.sink != nullptr) {
            std::exchange(pending.sink, nullptr)->failed(pending.started, "the connection is closed");
        }
    }
    connection.link->end();
}

bool Loop::left_all() const {
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const auto& connection) { return connection->stage == Stage::kEnded; });
}

}  // namespace megatronapp::transport::ucx
