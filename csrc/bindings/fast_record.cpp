#include "fast_record.hpp"

#include <array>
#include <cstdint>
#include <limits>

#include "megatronapp/ring_writer.hpp"

namespace megatronapp {
namespace {

constexpr Py_ssize_t kArguments = 11;
constexpr std::array<const char*, kArguments> kNames = {"start_ns",   "duration_ns", "step",  "ordinal", "aux",  "comm",
                                                        "microbatch", "kind",        "chunk", "layer",   "flags"};

/// The C++ object of a bound instance without virtual bases; null before its __init__ has run.
RingWriter* writer_of(PyObject* self) noexcept {
    const auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
    return instance->simple_layout ? static_cast<RingWriter*>(instance->simple_value_holder[0]) : nullptr;
}

void raise_out_of_range(std::size_t index, std::uint64_t largest) noexcept {
    PyErr_Format(PyExc_OverflowError, "record(): %s must lie between 0 and %llu", kNames[index],
                 static_cast<unsigned long long>(largest));
}

template <typename Field>
bool parse(PyObject* const* arguments, std::size_t index, Field& field) noexcept {
    constexpr std::uint64_t kLargest = std::numeric_limits<Field>::max();
    const unsigned long long value = PyLong_AsUnsignedLongLong(arguments[index]);
    if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
            raise_out_of_range(index, kLargest);
        }
        return false;
    }
    if (value > kLargest) {
        raise_out_of_range(index, kLargest);
        return false;
    }
    field = static_cast<Field>(value);
    return true;
}

PyObject* record(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
    if (count != kArguments) {
        return PyErr_Format(PyExc_TypeError, "record() takes %zd positional arguments, not %zd", kArguments, count);
    }
    Span span{};
    const bool parsed =
        parse(arguments, 0, span.start_ns) && parse(arguments, 1, span.duration_ns) && parse(arguments, 2, span.step) &&
        parse(arguments, 3, span.ordinal) && parse(arguments, 4, span.aux) && parse(arguments, 5, span.comm) &&
        parse(arguments, 6, span.microbatch) && parse(arguments, 7, span.kind) && parse(arguments, 8, span.chunk) &&
        parse(arguments, 9, span.layer) && parse(arguments, 10, span.flags);
    if (!parsed) {
        return nullptr;
    }
    RingWriter* writer = writer_of(self);
    if (writer == nullptr) {
        return PyErr_Format(PyExc_TypeError, "record(): RingWriter.__init__ was not called");
    }
    writer->record(span);
    Py_RETURN_NONE;
}

constexpr const char* kDoc =
    "record(start_ns, duration_ns, step, ordinal, aux, comm, microbatch, kind, chunk, layer, flags) -> None\n\n"
    "Append one ended span; positional arguments only. A duration over 34 s saturates and sets Flag.SATURATED.";

}  // namespace

void add_fast_record(pybind11::handle ring_writer_class) {
    static PyMethodDef definition = {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&record)),
                                     METH_FASTCALL, kDoc};
    auto* type = reinterpret_cast<PyTypeObject*>(ring_writer_class.ptr());
    const auto method = pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(type, &definition));
    if (!method) {
        throw pybind11::error_already_set();
    }
    ring_writer_class.attr("record") = method;
}

}  // namespace megatronapp
