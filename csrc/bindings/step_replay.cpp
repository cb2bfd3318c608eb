#include "step_replay.hpp"

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "megatronapp/step_replay.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

template <typename Value>
using Array = py::array_t<Value, py::array::c_style | py::array::forcecast>;

template <typename Value>
std::span<const Value> span_of(const Array<Value>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

std::unique_ptr<StepReplay> make_replay(const Array<std::int32_t>& dependency_begin,
                                        const Array<std::int32_t>& dependencies, const Array<std::int32_t>& group_begin,
                                        const Array<std::int32_t>& members, const Array<std::uint8_t>& spans_replicas,
                                        const Array<std::uint8_t>& is_end, const Array<double>& recorded,
                                        const Array<double>& ideal) {
    if (recorded.ndim() != 3) {
        throw std::invalid_argument("StepReplay: recorded has " + std::to_string(recorded.ndim()) +
                                    " axes; it must have operations, replicas and steps");
    }
    const ReplayPattern pattern{.dependency_begin = span_of(dependency_begin),
                                .dependencies = span_of(dependencies),
                                .group_begin = span_of(group_begin),
                                .members = span_of(members),
                                .spans_replicas = span_of(spans_replicas),
                                .is_end = span_of(is_end)};
    return std::make_unique<StepReplay>(pattern, span_of(recorded), span_of(ideal),
                                        static_cast<std::size_t>(recorded.shape(1)),
                                        static_cast<std::size_t>(recorded.shape(2)));
}

py::array_t<double> step_seconds(const StepReplay& replay, const Array<std::uint8_t>& is_recorded) {
    std::vector<double> seconds;
    {
        const std::span<const std::uint8_t> flags = span_of(is_recorded);
        const py::gil_scoped_release release;
        seconds = replay.step_seconds(flags);
    }
    const auto steps = static_cast<py::ssize_t>(replay.steps());
    const py::ssize_t scenarios =
        is_recorded.size() / static_cast<py::ssize_t>(replay.operations() * replay.replicas());
    return py::array_t<double>({scenarios, steps}, seconds.data());
}

}  // namespace

void bind_step_replay(py::module_& module) {
    py::class_<StepReplay>(module, "StepReplay", "Replays steps with recorded and ideal durations.")
        .def(py::init(&make_replay), py::kw_only(), py::arg("dependency_begin"), py::arg("dependencies"),
             py::arg("group_begin"), py::arg("members"), py::arg("spans_replicas"), py::arg("is_end"),
             py::arg("recorded"), py::arg("ideal"))
        .def("step_seconds", &step_seconds, py::arg("is_recorded"));
}

}  // namespace megatronapp
