#include "fast_record.hpp"

#include <array>

namespace megatronapp {
namespace {

constexpr Py_ssize_t kArguments = 11;
constexpr std::array<const char*, kArguments> kNames = {"start_ns",   "duration_ns", "step",  "ordinal", "aux",  "comm",
                                                        "microbatch", "kind",        "chunk", "layer",   "flags"};

}  // namespace

bool parse_record(PyObject* const* arguments, Py_ssize_t count, Span& span) noexcept {
    if (count != kArguments) {
        PyErr_Format(PyExc_TypeError, "record() takes %zd positional arguments, not %zd", kArguments, count);
        return false;
    }
    FastArguments fields("record", kNames.data(), arguments);
    return fields.take_all(span.start_ns, span.duration_ns, span.step, span.ordinal, span.aux, span.comm,
                           span.microbatch, span.kind, span.chunk, span.layer, span.flags);
}

}  // namespace megatronapp
