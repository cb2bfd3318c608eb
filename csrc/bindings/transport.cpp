#include "transport.hpp"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "megatronapp/transport/cuda/cuda_driver.hpp"
#include "megatronapp/transport/endpoint.hpp"
#include "megatronapp/transport/errors.hpp"
#include "megatronapp/transport/shm/layout.hpp"
#include "megatronapp/transport/ucx/device.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

using transport::Endpoint;
using transport::Message;
using transport::PeerStatistics;
using transport::Traffic;

/// Raises the class of megatronapp_native.errors with this name.
template <typename... Arguments>
void set_error(const char* name, Arguments&&... arguments) {
    const py::object type = py::module_::import("megatronapp_native.errors").attr(name);
    PyErr_SetObject(type.ptr(), type(std::forward<Arguments>(arguments)...).ptr());
}

void translate_transport_error(
    std::exception_ptr pointer) {  // NOLINT(performance-unnecessary-value-param): pybind11 asks
    try {
        if (pointer) {
            std::rethrow_exception(pointer);
        }
    } catch (const transport::TransferTimeoutError& error) {
        set_error("TransferTimeoutError", error.what(), error.timeout.peer, error.timeout.key, error.timeout.direction,
                  error.timeout.seconds);
    } catch (const transport::PeerLostError& error) {
        set_error("PeerLostError", error.what(), error.peer);
    } catch (const transport::TransportCorruptError& error) {
        set_error("TransportCorruptError", error.what());
    } catch (const transport::TransportMismatchError& error) {
        set_error("TransportMismatchError", error.what());
    } catch (const transport::DuplicateKeyError& error) {
        set_error("DuplicateKeyError", error.what());
    } catch (const transport::cuda::CudaError& error) {
        set_error("DeviceError", error.what(), error.function, error.code);
    } catch (const transport::TransportError& error) {
        set_error("TransportError", error.what());
    }
}

using StreamAddress = std::optional<std::uintptr_t>;

std::optional<transport::DeviceStream> stream_of(StreamAddress stream) {
    if (!stream) {
        return std::nullopt;
    }
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a number is how torch names a stream
    return transport::DeviceStream{reinterpret_cast<void*>(*stream)};
}

/// An endpoint that keeps the owner of each sent memory alive until its copy is complete. Every call that Python makes
/// often lets go of the owners whose copies are; owners are touched with the GIL only.
class OwningEndpoint {
  public:
    explicit OwningEndpoint(transport::Settings settings) : endpoint_(std::move(settings)) {}

    void send(std::uint32_t peer, std::uint64_t key, std::uintptr_t address, std::uint64_t bytes, py::object owner,
              StreamAddress stream) {
        release_owners();
        // NOLINTNEXTLINE(performance-no-int-to-ptr): an address is how torch names memory
        const auto* data = reinterpret_cast<const std::byte*>(address);
        const std::uint64_t ticket = endpoint_.send(peer, key, data, bytes, stream_of(stream));
        owners_.emplace(ticket, std::move(owner));
        release_owners();
    }

    /// Parts are tuples of address, offset in the message, and bytes.
    void send_parts(std::uint32_t peer, std::uint64_t key,
                    const std::vector<std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t>>& parts,
                    std::uint64_t bytes, py::object owner, StreamAddress stream) {
        release_owners();
        std::vector<transport::MessagePart> given;
        given.reserve(parts.size());
        for (const auto& [address, offset, length] : parts) {
            // NOLINTNEXTLINE(performance-no-int-to-ptr): an address is how torch names memory
            given.push_back({reinterpret_cast<const std::byte*>(address), offset, length});
        }
        const std::uint64_t ticket = endpoint_.send_parts(peer, key, std::move(given), bytes, stream_of(stream));
        owners_.emplace(ticket, std::move(owner));
        release_owners();
    }

    std::optional<Message> poll(std::uint32_t peer, std::uint64_t key) {
        release_owners();
        return endpoint_.poll(peer, key);
    }

    std::vector<Message> take_arrived(const std::vector<std::uint32_t>& peers) {
        release_owners();
        return endpoint_.take_arrived(peers);
    }

    /// Senders and keys of the messages that are announced and not whole.
    std::vector<std::pair<std::uint32_t, std::uint64_t>> posted(const std::vector<std::uint32_t>& peers) {
        std::vector<std::pair<std::uint32_t, std::uint64_t>> result;
        for (const std::uint32_t peer : peers) {
            for (const std::uint64_t key : endpoint_.posted(peer)) {
                result.emplace_back(peer, key);
            }
        }
        return result;
    }

    std::optional<Message> poll_posted(std::uint32_t peer, std::uint64_t key) {
        release_owners();
        return endpoint_.poll_posted(peer, key);
    }

    Message receive(std::uint32_t peer, std::uint64_t key, double deadline_s) {
        release_owners();
        const py::gil_scoped_release unlocked;
        return endpoint_.receive(peer, key, deadline_s);
    }

    bool wait_activity(std::uint32_t seen, double deadline_s) {
        release_owners();
        const py::gil_scoped_release unlocked;
        return endpoint_.wait_activity(seen, deadline_s);
    }

    void close(bool drain) {
        try {
            const py::gil_scoped_release unlocked;
            endpoint_.close(drain);
        } catch (...) {
            release_owners();
            throw;
        }
        release_owners();
    }

    /// Number of sends whose memory is still in use.
    std::size_t sending() {
        release_owners();
        return owners_.size();
    }

    Endpoint& endpoint() noexcept { return endpoint_; }

  private:
    void release_owners() {
        endpoint_.take_completed(completed_);
        // The destructor of an owner may run Python code that comes back here.
        std::vector<py::object> released;
        for (const std::uint64_t ticket : completed_) {
            const auto found = owners_.find(ticket);
            if (found != owners_.end()) {
                released.push_back(std::move(found->second));
                owners_.erase(found);
            }
        }
    }

    // The endpoint is destroyed first, and with it the threads that read the memory of the owners.
    std::unordered_map<std::uint64_t, py::object> owners_;
    std::vector<std::uint64_t> completed_;
    Endpoint endpoint_;
};

py::dict traffic_of(const Traffic& traffic) {
    py::dict result;
    result["transfers"] = traffic.transfers;
    result["bytes"] = traffic.bytes;
    result["copy_ns"] = traffic.copy_ns;
    return result;
}

py::dict statistics_of(const PeerStatistics& statistics) {
    py::list last;
    for (const transport::Transfer& transfer : statistics.last) {
        last.append(py::make_tuple(transfer.key, transfer.bytes, transfer.start_ns, transfer.end_ns, transfer.sent));
    }
    py::dict result;
    result["path"] = statistics.path;
    result["sent"] = traffic_of(statistics.sent);
    result["received"] = traffic_of(statistics.received);
    result["last"] = last;
    return result;
}

void bind_message(py::module_& module) {
    py::class_<Message>(module, "TransportMessage", py::buffer_protocol(), "A received message, in its slot.")
        .def_buffer([](const Message& message) {
            if (message.released()) {
                throw py::buffer_error("this message is released; its memory is that of another one");
            }
            if (message.on_device()) {
                throw py::buffer_error("this message is in memory of a device; use its address");
            }
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(message.data()),
                                   static_cast<py::ssize_t>(message.bytes()));
        })
        .def(
            "release",
            [](Message& self, StreamAddress stream) {
                if (stream) {
                    self.release_after(*stream_of(stream));
                } else {
                    self.release();
                }
            },
            py::arg("stream") = py::none())
        .def(
            "wait", [](const Message& self, std::uintptr_t stream) { self.wait(*stream_of(stream)); },
            py::arg("stream"))
        .def_property_readonly("complete", &Message::complete)
        .def_property_readonly("copied_ns",
                               [](const Message& self) -> std::optional<std::pair<std::uint64_t, std::uint64_t>> {
                                   const std::optional<transport::CopyTimes> times = self.times();
                                   return times ? std::optional(std::pair(times->start_ns, times->end_ns))
                                                : std::nullopt;
                               })
        .def_property_readonly("address",
                               [](const Message& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_property_readonly("released", &Message::released)
        .def_property_readonly("peer", &Message::peer)
        .def_property_readonly("key", &Message::key)
        .def_property_readonly("bytes", &Message::bytes)
        .def_property_readonly("queued_ns", &Message::queued_ns)
        .def_property_readonly("start_ns", &Message::start_ns)
        .def_property_readonly("end_ns", &Message::end_ns);
}

/// Runs Python's handlers of signals that came in while a thread waits without the GIL; raises what they raise.
void raise_of_signals() {
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
    }
}

std::unique_ptr<OwningEndpoint> make_endpoint(const std::string& directory, const std::string& job,
                                              std::uint64_t attempt, std::uint32_t rank, std::uint64_t slot_bytes,
                                              std::uint64_t slots, double deadline_s, std::uint32_t threads,
                                              std::optional<int> device, bool pinned) {
    return std::make_unique<OwningEndpoint>(transport::Settings{.directory = directory,
                                                                .job = job,
                                                                .attempt = attempt,
                                                                .rank = rank,
                                                                .slot_bytes = slot_bytes,
                                                                .slots = slots,
                                                                .deadline_s = deadline_s,
                                                                .threads = threads,
                                                                .while_waiting = raise_of_signals,
                                                                .device = device,
                                                                .pinned = pinned});
}

using EndpointClass = py::class_<OwningEndpoint>;

void bind_transfers(EndpointClass& endpoint) {
    endpoint.def(py::init(&make_endpoint), py::kw_only(), py::arg("directory"), py::arg("job"), py::arg("attempt"),
                 py::arg("rank"), py::arg("slot_bytes"), py::arg("slots"), py::arg("deadline_s"), py::arg("threads"),
                 py::arg("device") = py::none(), py::arg("pinned") = false);
    endpoint.def(
        "add_peer",
        [](OwningEndpoint& self, std::uint32_t peer, bool messages) { self.endpoint().add_peer(peer, messages); },
        py::arg("peer"), py::arg("messages"), py::call_guard<py::gil_scoped_release>());
    endpoint.def(
        "open_network",
        [](OwningEndpoint& self, const std::string& library, const std::string& devices) {
            const std::vector<std::byte> address = self.endpoint().open_network(library, devices);
            return py::bytes(reinterpret_cast<const char*>(address.data()), address.size());
        },
        py::kw_only(), py::arg("library"), py::arg("devices"));
    endpoint.def(
        "add_remote_peer",
        [](OwningEndpoint& self, std::uint32_t peer, bool messages, const std::string& address) {
            const auto* first = reinterpret_cast<const std::byte*>(address.data());
            self.endpoint().add_remote_peer(peer, messages, {first, first + address.size()});
        },
        py::arg("peer"), py::arg("messages"), py::arg("address"));
    endpoint.def(
        "round_trip_ns", [](OwningEndpoint& self, std::uint32_t peer) { return self.endpoint().round_trip_ns(peer); },
        py::arg("peer"));
    endpoint.def(
        "connect", [](OwningEndpoint& self) { self.endpoint().connect(); }, py::call_guard<py::gil_scoped_release>());
    endpoint.def("send", &OwningEndpoint::send, py::arg("peer"), py::arg("key"), py::arg("address"), py::arg("bytes"),
                 py::arg("owner"), py::arg("stream") = py::none());
    endpoint.def("send_parts", &OwningEndpoint::send_parts, py::arg("peer"), py::arg("key"), py::arg("parts"),
                 py::arg("bytes"), py::arg("owner"), py::arg("stream") = py::none());
    endpoint.def("poll", &OwningEndpoint::poll, py::arg("peer"), py::arg("key"));
    endpoint.def("take_arrived", &OwningEndpoint::take_arrived, py::arg("peers"));
    endpoint.def("posted", &OwningEndpoint::posted, py::arg("peers"));
    endpoint.def("poll_posted", &OwningEndpoint::poll_posted, py::arg("peer"), py::arg("key"));
    endpoint.def("receive", &OwningEndpoint::receive, py::arg("peer"), py::arg("key"), py::arg("deadline_s"));
    endpoint.def("activity", [](OwningEndpoint& self) { return self.endpoint().activity(); });
    endpoint.def("wait_activity", &OwningEndpoint::wait_activity, py::arg("seen"), py::arg("deadline_s"));
    endpoint.def("sending", &OwningEndpoint::sending);
    endpoint.def(
        "statistics",
        [](OwningEndpoint& self, std::uint32_t peer) { return statistics_of(self.endpoint().statistics(peer)); },
        py::arg("peer"));
    endpoint.def("close", &OwningEndpoint::close, py::arg("drain"));
}

void bind_small_messages(EndpointClass& endpoint) {
    endpoint.def(
        "publish",
        [](OwningEndpoint& self, std::uint32_t index, std::uint64_t value, StreamAddress stream) {
            if (stream) {
                self.endpoint().publish_after(*stream_of(stream), index, value);
            } else {
                self.endpoint().publish(index, value);
            }
        },
        py::arg("index"), py::arg("value"), py::arg("stream") = py::none());
    endpoint.def(
        "read",
        [](OwningEndpoint& self, std::uint32_t peer, std::uint32_t index) { return self.endpoint().read(peer, index); },
        py::arg("peer"), py::arg("index"));
    endpoint.def(
        "lead",
        [](OwningEndpoint& self, const std::vector<std::uint32_t>& followers) { self.endpoint().lead(followers); },
        py::arg("followers"));
    endpoint.def(
        "append",
        [](OwningEndpoint& self, std::uint64_t value, double deadline_s) { self.endpoint().append(value, deadline_s); },
        py::arg("value"), py::arg("deadline_s"), py::call_guard<py::gil_scoped_release>());
    endpoint.def(
        "poll_entry", [](OwningEndpoint& self, std::uint32_t leader) { return self.endpoint().poll_entry(leader); },
        py::arg("leader"));
    endpoint.def(
        "next_entry",
        [](OwningEndpoint& self, std::uint32_t leader, double deadline_s) {
            return self.endpoint().next_entry(leader, deadline_s);
        },
        py::arg("leader"), py::arg("deadline_s"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_transport(py::module_& module) {
    py::register_exception_translator(&translate_transport_error);
    bind_message(module);
    EndpointClass endpoint(module, "TransportEndpoint", "The transport of one rank.");
    bind_transfers(endpoint);
    bind_small_messages(endpoint);
    module.def("interface_of", &transport::ucx::interface_of, py::arg("address"),
               "Return the network interface of this machine that has an address.");
    module.attr("PROGRESS_WORDS") = transport::kProgressWords;
}

}  // namespace megatronapp
