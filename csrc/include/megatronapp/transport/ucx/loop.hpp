#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "megatronapp/transport/path.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/ucx/api.hpp"
#include "megatronapp/transport/ucx/clock_distance.hpp"
#include "megatronapp/transport/ucx/link.hpp"
#include "megatronapp/transport/ucx/message_data.hpp"
#include "megatronapp/transport/ucx/wire.hpp"

namespace megatronapp::transport::ucx {

/// What a thread of the application wants done.
struct Order {
    enum class Task : std::uint8_t { kTell, kSend, kLeave };

    Task task;
    std::uint32_t peer;
    Kind kind = Kind::kMessage;
    Body body{};
    StartedSend started{};
    CopySink* sink = nullptr;
};

/// All that the progress thread does with UCX. Used by one thread at a time.
class Loop {
  public:
    Loop(const Library& library, WorkerHandle* worker, const Recipient& self, double deadline_s, BoardLayout* board)
        : library_(&library), worker_(worker), self_(self), deadline_s_(deadline_s), board_(board) {}
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;
    Loop(Loop&&) = delete;
    Loop& operator=(Loop&&) = delete;
    ~Loop() = default;

    void add(std::shared_ptr<Link> link, std::vector<std::byte> address);

    /// Makes the endpoints and greets the peers.
    void start();
    void carry_out(const Order& order);
    /// Whether anything happened.
    bool progress();
    /// Sends signs of life, notices peers that send none, and goes on with taking leave.
    void examine(std::uint64_t now_ns);
    void leave_all();
    [[nodiscard]] bool left_all() const;

  private:
    enum class Stage : std::uint8_t { kOpen, kLeaving, kClosing, kEnded };

    struct Connection {
        Loop* loop;
        std::shared_ptr<Link> link;
        std::vector<std::byte> address;
        EndpointHandle* endpoint = nullptr;
        Stage stage = Stage::kOpen;
        bool broken = false;           ///< UCX has reported an error; nothing more can be sent
        std::uint64_t numbers = 0;     ///< of headers
        std::uint64_t delivered = 0;   ///< messages
        std::uint32_t operations = 0;  ///< that UCX has not ended
        std::uint32_t beats_out = 0;
        std::uint64_t heard_ns = 0;
        std::uint64_t beat_ns = 0;       ///< when this rank sent the last one
        std::uint64_t peer_beat_ns = 0;  ///< of the peer's clock
        std::uint64_t got_beat_ns = 0;
        std::uint64_t left_ns = 0;  ///< `beat_ns` of the beat that asks whether the farewell has arrived
        std::uint64_t stage_until_ns = 0;
        void* close_request = nullptr;
        ClockDistance clock;
    };

    /// A call of UCX that ends later.
    struct Operation {
        Connection* connection;  ///< none: free
        HeaderBytes header;
        Kind kind;
        StartedSend started;
        CopySink* sink;
        Arrival arrival;
        MessageData data;
    };

    static void on_sent(void* request, Status status, void* user_data);
    static void on_received(void* request, Status status, std::size_t length, void* user_data);
    static void on_error(void* argument, EndpointHandle* endpoint, Status status);
    static Status on_message(void* argument, const void* header, std::size_t header_length, void* data,
                             std::size_t length, const ReceivedParams* params);

    [[nodiscard]] Connection* find(std::uint32_t peer) noexcept;
    Operation& operation(Connection& connection);
    void make_endpoint(Connection& connection);
    void broken(Connection& connection, Status status);

    void tell(Connection& connection, Kind kind, const Body& body);
    void send(Connection& connection, const StartedSend& started, CopySink& sink);
    void post(Operation& operation, const Body& body, std::uint32_t flags);
    void sent(Operation& operation, Status status);
    void beat(Connection& connection, bool wants_reply);

    Status dispatch(const Header& header, void* data, std::size_t length, bool rendezvous);
    void rejected(const Decoded& decoded);
    Status message(Connection& connection, const Header& header, void* data, std::size_t length, bool rendezvous);
    void received(Operation& operation, Status status);
    void land(Connection& connection, Arrival arrival);
    void news(Connection& connection, const Header& header);
    void log_news(Connection& connection, const Header& header);
    void beaten(Connection& connection, const Header& header);

    void leave(Connection& connection);
    void close(Connection& connection, std::uint64_t now_ns);
    void advance(Connection& connection, std::uint64_t now_ns);
    void end(Connection& connection);

    const Library* library_;
    WorkerHandle* worker_;
    Recipient self_;
    double deadline_s_;
    BoardLayout* board_;
    std::vector<std::unique_ptr<Connection>> connections_;
    std::deque<Operation> operations_;
    std::vector<Operation*> free_;
};

}  // namespace megatronapp::transport::ucx
