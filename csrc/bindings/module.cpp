#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "detect.hpp"
#include "device_recorder.hpp"
#include "fast_record.hpp"
#include "megatronapp/clock.hpp"
#include "megatronapp/error.hpp"
#include "megatronapp/ring_reader.hpp"
#include "megatronapp/ring_writer.hpp"
#include "megatronapp/run_queue.hpp"
#include "megatronapp/stop_meter.hpp"
#include "rank_records.hpp"
#include "step_replay.hpp"
#include "transport.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

/// Raises megatronapp_native.errors.RingError, so that Python code has one exception tree to catch.
void translate_ring_error(std::exception_ptr pointer) {  // NOLINT(performance-unnecessary-value-param): pybind11 asks
    try {
        if (pointer) {
            std::rethrow_exception(pointer);
        }
    } catch (const RingError& error) {
        py::set_error(py::module_::import("megatronapp_native.errors").attr("RingError"), error.what());
    }
}

/// A reader that Python threads may share: its position is moved by one of them at a time.
class SharedReader {
    // Private, but deduced return types have to be known before they are used.
    RingReader& open() {
        if (!reader_) {
            throw RingError("this reader is closed");
        }
        return *reader_;
    }

    template <typename Function>
    auto with_lock(Function function) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard lock(mutex_);
        return function(open());
    }

  public:
    explicit SharedReader(const std::string& path) : reader_(std::make_unique<RingReader>(path)) {}

    std::pair<py::bytes, std::uint64_t> read(std::uint64_t max_records) {
        // The lock is taken without the GIL: a thread that waits for it must not keep its owner from going on.
        py::gil_scoped_release unlocked;
        const std::lock_guard lock(mutex_);
        const std::uint64_t room = open().available(max_records);
        py::gil_scoped_acquire locked;
        auto body = py::reinterpret_steal<py::bytes>(
            PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(room * kRecordBytes)));
        if (!body) {
            throw py::error_already_set();
        }
        auto* out = reinterpret_cast<Item<kRecordWords>*>(PyBytes_AS_STRING(body.ptr()));
        std::uint64_t lost = 0;
        Copied copied{};
        {
            py::gil_scoped_release copying;
            copied = reader_->read(out, room, lost);
        }
        if (copied.count == room) {
            return {std::move(body), lost};
        }
        const auto* whole = reinterpret_cast<const char*>(out + copied.skipped);
        return {py::bytes(whole, copied.count * kRecordBytes), lost};
    }

    RingInfo info() {
        return with_lock([](const RingReader& reader) { return reader.info(); });
    }

    std::uint64_t next_index() {
        return with_lock([](const RingReader& reader) { return reader.next_index(); });
    }

    void close() {
        const py::gil_scoped_release unlocked;
        const std::lock_guard lock(mutex_);
        reader_.reset();
    }

  private:
    std::mutex mutex_;
    std::unique_ptr<RingReader> reader_;
};

void bind_values(py::module_& module) {
    py::class_<OpenSpan>(module, "OpenSpan", "What a producer is inside of.")
        .def_readonly("kind", &OpenSpan::kind)
        .def_readonly("step", &OpenSpan::step)
        .def_readonly("microbatch", &OpenSpan::microbatch)
        .def_readonly("start_ns", &OpenSpan::start_ns);
    py::class_<RingInfo>(module, "RingInfo", "What a ring says about itself.")
        .def_readonly("attempt", &RingInfo::attempt)
        .def_readonly("capacity", &RingInfo::capacity)
        .def_readonly("head", &RingInfo::head)
        .def_readonly("overwritten", &RingInfo::overwritten)
        .def_readonly("closed", &RingInfo::closed)
        .def_readonly("boot_id", &RingInfo::boot_id)
        .def_readonly("clock_id", &RingInfo::clock_id)
        .def_readonly("pid", &RingInfo::pid)
        .def_readonly("heartbeat_ns", &RingInfo::heartbeat_ns)
        .def_readonly("open_span", &RingInfo::open_span)
        .def_readonly("device_span", &RingInfo::device_span)
        .def_property_readonly("clock_pairs",
                               [](const RingInfo& info) {
                                   py::list pairs;
                                   for (const ClockPair& pair : info.clock_pairs) {
                                       pairs.append(py::make_tuple(pair.monotonic_ns, pair.realtime_ns));
                                   }
                                   return pairs;
                               })
        .def_property_readonly("metadata", [](const RingInfo& info) { return py::bytes(info.metadata); });
}

void bind_writer(py::module_& module) {
    py::class_<RingWriter> writer(module, "RingWriter", "The single producer of a ring file; one thread at a time.");
    writer
        .def(py::init(
                 [](const std::string& path, std::uint64_t capacity, std::uint64_t attempt, const py::bytes& metadata) {
                     return std::make_unique<RingWriter>(path, capacity, attempt, std::string_view(metadata));
                 }),
             py::arg("path"), py::arg("capacity"), py::arg("attempt"), py::arg("metadata"))
        .def(
            "open_span",
            [](RingWriter& self, std::uint8_t kind, std::uint32_t step, std::uint16_t microbatch,
               std::uint64_t start_ns) {
                self.open_span({.start_ns = start_ns, .step = step, .microbatch = microbatch, .kind = kind});
            },
            py::arg("kind"), py::arg("step"), py::arg("microbatch"), py::arg("start_ns"))
        .def("close_span", &RingWriter::close_span)
        .def("heartbeat", &RingWriter::heartbeat)
        .def("clock_pair", &RingWriter::clock_pair)
        .def("close", &RingWriter::close, py::arg("unlink"));
    add_fast_record<RingWriter>(writer);
}

void bind_reader(py::module_& module) {
    py::class_<SharedReader>(module, "RingReader", "One reader of a ring file, with its own position.")
        .def(py::init<const std::string&>(), py::arg("path"))
        .def("read", &SharedReader::read, py::arg("max_records"))
        .def("info", &SharedReader::info)
        .def_property_readonly("next_index", &SharedReader::next_index)
        .def("close", &SharedReader::close);
}

void bind_stop_meter(py::module_& module) {
    py::class_<StopMeter>(module, "StopMeter", "Measures when this process did not run.")
        .def(py::init<std::uint64_t>(), py::arg("period_ns") = StopMeter::kPeriodNs)
        .def("take",
             [](StopMeter& self) {
                 py::list stops;
                 for (const Stop& stop : self.take()) {
                     stops.append(py::make_tuple(stop.start_ns, stop.end_ns));
                 }
                 return stops;
             })
        .def("close", &StopMeter::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace megatronapp

PYBIND11_MODULE(_native, module) {
    py::register_exception_translator(&megatronapp::translate_ring_error);
    megatronapp::bind_values(module);
    megatronapp::bind_writer(module);
    megatronapp::bind_reader(module);
    megatronapp::bind_device_recorder(module);
    megatronapp::bind_transport(module);
    megatronapp::bind_detect(module);
    megatronapp::bind_step_replay(module);
    megatronapp::bind_rank_records(module);
    megatronapp::bind_stop_meter(module);
    module.def("monotonic_ns", &megatronapp::monotonic_ns, "CLOCK_MONOTONIC in nanoseconds.");
    module.def("run_queue_ns", &megatronapp::run_queue_ns,
               "Nanoseconds that the calling thread waited for a processor since it began; 0 where unknown.");
}
