#include "rank_records.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
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

}  // namespace

void bind_rank_records(py::module_& module) { module.def("merge_by_rank", &merge, py::arg("parts"), py::arg("rows")); }

}  // namespace megatronapp
