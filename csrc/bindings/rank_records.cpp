#include "rank_records.hpp"

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <stdexcept>
#include <vector>

#include "megatronapp/rank_records.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

/// The memory of a Python object, whatever its items are, for as long as this lives.
class Bytes {
  public:
    Bytes(py::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw py::error_already_set();
        }
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    Bytes(Bytes&&) = delete;
    Bytes& operator=(Bytes&&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    [[nodiscard]] std::span<std::byte> span() const {
        return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }

  private:
    Py_buffer view_{};
};

void merge(const py::list& parts, const py::object& rows) {
    const Bytes out(rows, PyBUF_WRITABLE);
    std::deque<Bytes> sources;
    std::vector<RecordPart> received;
    received.reserve(parts.size());
    for (const py::handle part : parts) {
        const auto pair = py::cast<py::tuple>(part);
        sources.emplace_back(pair[1], PyBUF_SIMPLE);
        received.push_back({py::cast<std::int32_t>(pair[0]), sources.back().span()});
    }
    const py::gil_scoped_release release;
    merge_by_rank(received, out.span());
}

py::tuple summarize(const py::object& records) {
    const Bytes source(records, PyBUF_SIMPLE);
    const FrameSummary found = summarize_frame(source.span());
    return py::make_tuple(found.least_step, found.greatest_step, found.kinds);
}

void sum(const py::object& rows, const py::object& columns_of_kind, std::uint8_t busy, std::uint8_t run_queue_flag,
         const py::object& sums) {
    const Bytes source(rows, PyBUF_SIMPLE);
    const Bytes of_kind(columns_of_kind, PyBUF_SIMPLE);
    auto out = py::cast<py::array_t<double, py::array::c_style>>(sums);
    SumColumns columns{{}, busy, run_queue_flag};
    if (of_kind.span().size() != columns.of_kind.size() || out.ndim() != 2 || out.ptr() != sums.ptr()) {
        throw std::invalid_argument("sum_spans: columns of 256 kinds and a table [column][rank] of float64 are needed");
    }
    std::memcpy(columns.of_kind.data(), of_kind.span().data(), columns.of_kind.size());
    const auto world = static_cast<std::size_t>(out.shape(1));
    const std::span<double> found{out.mutable_data(), static_cast<std::size_t>(out.size())};
    const py::gil_scoped_release release;
    sum_spans(source.span(), columns, world, found);
}

}  // namespace

void bind_rank_records(py::module_& module) {
    module.def("merge_by_rank", &merge, py::arg("parts"), py::arg("rows"));
    module.def("summarize_frame", &summarize, py::arg("records"));
    module.def("sum_spans", &sum, py::arg("rows"), py::arg("columns_of_kind"), py::arg("busy"),
               py::arg("run_queue_flag"), py::arg("sums"));
}

}  // namespace megatronapp
