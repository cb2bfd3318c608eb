#include "device_recorder.hpp"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fast_record.hpp"
#include "megatronapp/trace/device_recorder.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

constexpr Py_ssize_t kBeginArguments = 9;
constexpr std::array<const char*, kBeginArguments> kBeginNames = {"kind",    "step",  "microbatch", "chunk", "comm",
                                                                  "ordinal", "layer", "flags",      "stream"};
constexpr Py_ssize_t kEndArguments = 4;
constexpr std::array<const char*, kEndArguments> kEndNames = {"number", "flags", "is_anchor", "stream"};
constexpr Py_ssize_t kPointArguments = 10;
constexpr std::array<const char*, kPointArguments> kPointNames = {"kind",    "step",  "microbatch", "chunk",  "comm",
                                                                  "ordinal", "layer", "flags",      "stream", "aux"};

DeviceStream stream_at(std::uint64_t handle) noexcept {
    return reinterpret_cast<DeviceStream>(handle);  // NOLINT(performance-no-int-to-ptr): how torch names streams
}

DeviceRecorder* called(PyObject* self, const char* function, Py_ssize_t count, Py_ssize_t expected) noexcept {
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, not %zd", function, expected, count);
        return nullptr;
    }
    auto* recorder = object_of<DeviceRecorder>(self);
    if (recorder == nullptr) {
        PyErr_Format(PyExc_TypeError, "%s(): __init__ was not called", function);
    }
    return recorder;
}

PyObject* begin(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
    DeviceRecorder* recorder = called(self, "begin", count, kBeginArguments);
    Span span{};
    std::uint64_t stream = 0;
    FastArguments fields("begin", kBeginNames.data(), arguments);
    if (recorder == nullptr || !fields.take_all(span.kind, span.step, span.microbatch, span.chunk, span.comm,
                                                span.ordinal, span.layer, span.flags, stream)) {
        return nullptr;
    }
    return PyLong_FromUnsignedLongLong(recorder->begin(span, stream_at(stream)));
}

PyObject* end(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
    DeviceRecorder* recorder = called(self, "end", count, kEndArguments);
    std::uint64_t number = 0;
    std::uint8_t flags = 0;
    std::uint8_t is_anchor = 0;
    std::uint64_t stream = 0;
    FastArguments fields("end", kEndNames.data(), arguments);
    if (recorder == nullptr || !fields.take_all(number, flags, is_anchor, stream)) {
        return nullptr;
    }
    recorder->end(number, flags, is_anchor != 0, stream_at(stream));
    Py_RETURN_NONE;
}

PyObject* mark(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
    DeviceRecorder* recorder = called(self, "mark", count, kPointArguments);
    Span span{};
    std::uint64_t stream = 0;
    FastArguments fields("mark", kPointNames.data(), arguments);
    if (recorder == nullptr || !fields.take_all(span.kind, span.step, span.microbatch, span.chunk, span.comm,
                                                span.ordinal, span.layer, span.flags, stream, span.aux)) {
        return nullptr;
    }
    recorder->mark(span, stream_at(stream));
    Py_RETURN_NONE;
}

std::unique_ptr<DeviceRecorder> make_recorder(RingWriter* ring, int device, const std::string& library) {
    const EventDriver driver = load_event_driver(library);
    const py::gil_scoped_release unlocked;
    auto recorder = std::make_unique<DeviceRecorder>(ring, driver, device);
    recorder->start();
    return recorder;
}

std::vector<std::tuple<int, int, std::uint64_t>> take_lengths(DeviceRecorder& recorder) {
    std::vector<std::tuple<int, int, std::uint64_t>> lengths;
    for (const DeviceLength& length : recorder.take_lengths()) {
        lengths.emplace_back(length.kind, length.flags, length.duration_ns);
    }
    return lengths;
}

}  // namespace

void bind_device_recorder(py::module_& module) {
    static PyMethodDef begin_method = {"begin", as_method(&begin), METH_FASTCALL,
                                       "begin(kind, step, microbatch, chunk, comm, ordinal, layer, flags, stream)"};
    static PyMethodDef end_method = {"end", as_method(&end), METH_FASTCALL, "end(number, flags, is_anchor, stream)"};
    static PyMethodDef mark_method = {"mark", as_method(&mark), METH_FASTCALL,
                                      "mark(kind, step, microbatch, chunk, comm, ordinal, layer, flags, stream, aux)"};
    py::class_<DeviceRecorder> recorder(module, "DeviceRecorder", "Records spans of a CUDA stream by pooled events.");
    recorder
        .def(py::init(&make_recorder), py::arg("ring").none(true), py::arg("device"),
             py::arg("library") = "libcuda.so.1", py::keep_alive<1, 2>())
        .def("take_lengths", &take_lengths)
        .def("finish", &DeviceRecorder::finish, py::arg("timeout_ns"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("dropped", &DeviceRecorder::dropped)
        .def_property_readonly("failure", &DeviceRecorder::failure)
        .def_property_readonly("uncertainty_ns", &DeviceRecorder::uncertainty_ns);
    add_fast_record<DeviceRecorder>(recorder);
    for (PyMethodDef* method : {&begin_method, &end_method, &mark_method}) {
        add_fast_method(recorder, *method);
    }
}

}  // namespace megatronapp
