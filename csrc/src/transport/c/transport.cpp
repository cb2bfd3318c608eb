#include "megatronapp/transport.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatronapp/transport/endpoint.hpp"
#include "megatronapp/transport/errors.hpp"

namespace transport = megatronapp::transport;

struct megatronapp_transport {
    transport::Endpoint endpoint;
    std::mutex mutex;
    std::vector<std::uint64_t> completed;  // not handed out yet
    std::vector<std::uint64_t> taken;
};

namespace {

/// The public view of a message, with the message that keeps its slot.
struct HeldMessage : megatronapp_message {
    explicit HeldMessage(transport::Message given)
        : megatronapp_message{.data = given.data(),
                              .bytes = given.bytes(),
                              .key = given.key(),
                              .peer = given.peer(),
                              .queued_ns = given.queued_ns(),
                              .start_ns = given.start_ns(),
                              .end_ns = given.end_ns()},
          message(std::move(given)) {}

    transport::Message message;
};

std::string& last_error() {
    thread_local std::string text;
    return text;
}

int failed(int status, const char* text) noexcept {
    try {
        last_error() = text;
    } catch (const std::bad_alloc&) {
        last_error().clear();
    }
    return status;
}

/// Calls the function; no exception leaves it.
template <typename Function>
int guarded(Function function) noexcept {
    try {
        function();
        return MEGATRONAPP_OK;
    } catch (const transport::TransferTimeoutError& error) {
        return failed(MEGATRONAPP_TIMEOUT, error.what());
    } catch (const transport::PeerLostError& error) {
        return failed(MEGATRONAPP_PEER_LOST, error.what());
    } catch (const transport::DuplicateKeyError& error) {
        return failed(MEGATRONAPP_DUPLICATE_KEY, error.what());
    } catch (const transport::TransportCorruptError& error) {
        return failed(MEGATRONAPP_CORRUPT, error.what());
    } catch (const transport::TransportMismatchError& error) {
        return failed(MEGATRONAPP_MISMATCH, error.what());
    } catch (const std::bad_alloc&) {
        return failed(MEGATRONAPP_NO_MEMORY, "no memory");
    } catch (const std::exception& error) {
        return failed(MEGATRONAPP_ERROR, error.what());
    }
}

template <typename... Pointers>
void require(const Pointers*... pointers) {
    if (((pointers == nullptr) || ...)) {
        throw transport::TransportError("a pointer is NULL; give one to each argument that is none of the optional");
    }
}

megatronapp_traffic traffic_of(const transport::Traffic& traffic) {
    return {.transfers = traffic.transfers, .bytes = traffic.bytes, .copy_ns = traffic.copy_ns};
}

}  // namespace

const char* megatronapp_transport_error(void) { return last_error().c_str(); }

int megatronapp_transport_create(const megatronapp_transport_options* options, megatronapp_transport** transport) {
    return guarded([&] {
        require(options, transport);
        require(options->directory, options->job);
        *transport = new megatronapp_transport{.endpoint = transport::Endpoint({.directory = options->directory,
                                                                                .job = options->job,
                                                                                .attempt = options->attempt,
                                                                                .rank = options->rank,
                                                                                .slot_bytes = options->slot_bytes,
                                                                                .slots = options->slots,
                                                                                .deadline_s = options->deadline_s,
                                                                                .threads = options->threads}),
                                               .mutex = {},
                                               .completed = {},
                                               .taken = {}};
    });
}

int megatronapp_transport_add_peer(megatronapp_transport* transport, std::uint32_t peer) {
    return guarded([&] {
        require(transport);
        transport->endpoint.add_peer(peer, true);
    });
}

int megatronapp_transport_connect(megatronapp_transport* transport) {
    return guarded([&] {
        require(transport);
        transport->endpoint.connect();
    });
}

int megatronapp_transport_send(megatronapp_transport* transport, std::uint32_t peer, std::uint64_t key,
                               const void* data, std::uint64_t bytes, std::uint64_t* ticket) {
    return guarded([&] {
        require(transport);
        if (bytes != 0) {
            require(data);
        }
        const std::uint64_t given = transport->endpoint.send(peer, key, static_cast<const std::byte*>(data), bytes);
        if (ticket != nullptr) {
            *ticket = given;
        }
    });
}

int megatronapp_transport_send_parts(megatronapp_transport* transport, std::uint32_t peer, std::uint64_t key,
                                     const megatronapp_part* parts, std::size_t count, std::uint64_t bytes,
                                     std::uint64_t* ticket) {
    return guarded([&] {
        require(transport);
        if (count != 0) {
            require(parts);
        }
        std::vector<transport::MessagePart> given;
        for (std::size_t i = 0; i < count; ++i) {
            if (parts[i].bytes != 0) {
                require(parts[i].data);
            }
            given.push_back({static_cast<const std::byte*>(parts[i].data), parts[i].offset, parts[i].bytes});
        }
        const std::uint64_t sent = transport->endpoint.send_parts(peer, key, std::move(given), bytes);
        if (ticket != nullptr) {
            *ticket = sent;
        }
    });
}

int megatronapp_transport_completed(megatronapp_transport* transport, std::uint64_t* tickets, std::size_t capacity,
                                    std::size_t* count) {
    return guarded([&] {
        require(transport, tickets, count);
        const std::lock_guard lock(transport->mutex);
        std::vector<std::uint64_t>& completed = transport->completed;
        transport->endpoint.take_completed(transport->taken);
        completed.insert(completed.end(), transport->taken.begin(), transport->taken.end());
        *count = std::min(capacity, completed.size());
        const auto end = completed.begin() + static_cast<std::ptrdiff_t>(*count);
        std::copy(completed.begin(), end, tickets);
        completed.erase(completed.begin(), end);
    });
}

int megatronapp_transport_poll(megatronapp_transport* transport, std::uint32_t peer, std::uint64_t key,
                               megatronapp_message** message) {
    return guarded([&] {
        require(transport, message);
        std::optional<transport::Message> found = transport->endpoint.poll(peer, key);
        *message = found ? new HeldMessage(std::move(*found)) : nullptr;
    });
}

int megatronapp_transport_receive(megatronapp_transport* transport, std::uint32_t peer, std::uint64_t key,
                                  double deadline_s, megatronapp_message** message) {
    return guarded([&] {
        require(transport, message);
        *message = new HeldMessage(transport->endpoint.receive(peer, key, deadline_s));
    });
}

void megatronapp_message_release(megatronapp_message* message) { delete static_cast<HeldMessage*>(message); }

int megatronapp_transport_activity(megatronapp_transport* transport, std::uint32_t* activity) {
    return guarded([&] {
        require(transport, activity);
        *activity = transport->endpoint.activity();
    });
}

int megatronapp_transport_wait(megatronapp_transport* transport, std::uint32_t seen, double deadline_s, int* changed) {
    return guarded([&] {
        require(transport, changed);
        *changed = transport->endpoint.wait_activity(seen, deadline_s) ? 1 : 0;
    });
}

int megatronapp_transport_statistics(megatronapp_transport* transport, std::uint32_t peer,
                                     megatronapp_statistics* statistics) {
    return guarded([&] {
        require(transport, statistics);
        const transport::PeerStatistics found = transport->endpoint.statistics(peer);
        *statistics = {.path = {}, .sent = traffic_of(found.sent), .received = traffic_of(found.received)};
        std::strncpy(statistics->path, found.path, sizeof(statistics->path) - 1);
    });
}

int megatronapp_transport_close(megatronapp_transport* transport, int drain) {
    return guarded([&] {
        require(transport);
        transport->endpoint.close(drain != 0);
    });
}

void megatronapp_transport_destroy(megatronapp_transport* transport) { delete transport; }
