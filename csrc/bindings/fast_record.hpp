#pragma once

#include <pybind11/pybind11.h>

#include "fast_arguments.hpp"
#include "megatronapp/record.hpp"

namespace megatronapp {

/// Reads the arguments of `record`; sets a Python error and returns false where they are wrong.
bool parse_record(PyObject* const* arguments, Py_ssize_t count, Span& span) noexcept;

/// The method `record` of a bound class, called without pybind11's dispatcher: a record is made some hundred times a
/// step in the training path, and the dispatcher costs several times the record itself.
template <typename Recorder>
PyObject* fast_record(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
    Span span{};
    if (!parse_record(arguments, count, span)) {
        return nullptr;
    }
    auto* recorder = object_of<Recorder>(self);
    if (recorder == nullptr) {
        return PyErr_Format(PyExc_TypeError, "record(): __init__ was not called");
    }
    recorder->record(span);
    Py_RETURN_NONE;
}

inline constexpr const char* kRecordDoc =
    "record(start_ns, duration_ns, step, ordinal, aux, comm, microbatch, kind, chunk, layer, flags) -> None\n\n"
    "Append one ended span; positional arguments only. A duration over 34 s saturates and sets Flag.SATURATED.";

/// Gives a bound class its `record` method.
template <typename Recorder>
void add_fast_record(pybind11::handle bound_class) {
    static PyMethodDef definition = {"record", as_method(&fast_record<Recorder>), METH_FASTCALL, kRecordDoc};
    add_fast_method(bound_class, definition);
}

}  // namespace megatronapp
