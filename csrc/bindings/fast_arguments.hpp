/// Arguments of methods that are called without pybind11's dispatcher, by position only.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>

namespace megatronapp {

/// The C++ object of a bound instance without virtual bases; null before its __init__ has run.
template <typename Object>
Object* object_of(PyObject* self) noexcept {
    const auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
    return instance->simple_layout ? static_cast<Object*>(instance->simple_value_holder[0]) : nullptr;
}

/// Positional arguments of a call; each `take` reads one as an unsigned integer and sets a Python error if it is none,
/// or too large for its field.
class FastArguments {
  public:
    FastArguments(const char* function, const char* const* names, PyObject* const* values) noexcept
        : function_(function), names_(names), values_(values) {}

    template <typename Field>
    bool take(Field& field) noexcept {
        constexpr std::uint64_t kLargest = std::numeric_limits<Field>::max();
        const Py_ssize_t place = place_++;
        const unsigned long long value = PyLong_AsUnsignedLongLong(values_[place]);
        if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
                raise_out_of_range(place, kLargest);
            }
            return false;
        }
        if (value > kLargest) {
            raise_out_of_range(place, kLargest);
            return false;
        }
        field = static_cast<Field>(value);
        return true;
    }

    template <typename... Fields>
    bool take_all(Fields&... fields) noexcept {
        return (take(fields) && ...);
    }

  private:
    void raise_out_of_range(Py_ssize_t place, std::uint64_t largest) const noexcept {
        PyErr_Format(PyExc_OverflowError, "%s(): %s must lie between 0 and %llu", function_, names_[place],
                     static_cast<unsigned long long>(largest));
    }

    const char* function_;
    const char* const* names_;
    PyObject* const* values_;
    Py_ssize_t place_ = 0;
};

/// Gives a bound class a method with the calling convention METH_FASTCALL. The definition must live for ever.
inline void add_fast_method(pybind11::handle bound_class, PyMethodDef& definition) {
    auto* type = reinterpret_cast<PyTypeObject*>(bound_class.ptr());
    const auto method = pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(type, &definition));
    if (!method) {
        throw pybind11::error_already_set();
    }
    bound_class.attr(definition.ml_name) = method;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyCFunction as_method(FastFunction function) noexcept {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace megatronapp
