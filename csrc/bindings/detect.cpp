#include "detect.hpp"

#include <pybind11/numpy.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>

#include "megatronapp/detect/column_test.hpp"
#include "megatronapp/detect/medians.hpp"

namespace py = pybind11;

namespace megatronapp {
namespace {

template <typename Value>
using Array = py::array_t<Value, py::array::c_style | py::array::forcecast>;

template <typename Value>
std::span<const Value> span_of(const Array<Value>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

template <typename Value>
std::span<Value> writable(py::array_t<Value>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

std::span<std::uint8_t> flags(py::array_t<bool>& array) {
    static_assert(sizeof(bool) == sizeof(std::uint8_t));
    return {reinterpret_cast<std::uint8_t*>(array.mutable_data()), static_cast<std::size_t>(array.size())};
}

template <std::size_t Size>
std::array<double, Size> numbers(const Array<double>& values, const char* name) {
    std::array<double, Size> found{};
    if (static_cast<std::size_t>(values.size()) != Size) {
        throw std::invalid_argument("ColumnTest: " + std::string(name) + " has " + std::to_string(values.size()) +
                                    " numbers; it must have " + std::to_string(Size));
    }
    std::copy_n(values.data(), Size, found.begin());
    return found;
}

constexpr std::size_t kLimits = 7;

/// A test that Python threads may share: they use it one at a time.
class SharedColumnTest {
  public:
    SharedColumnTest(const Array<std::int64_t>& peers, const detect::ColumnSettings& settings,
                     const Array<double>& prior_errors)
        : test_(span_of(peers), settings, numbers<detect::kWindows.size()>(prior_errors, "prior_errors")) {}

    void grow(const Array<std::int64_t>& peers) {
        const std::lock_guard lock(mutex_);
        test_.grow(span_of(peers));
    }

    py::tuple compare(const Array<double>& values, const Array<double>& limits) {
        const auto given = numbers<kLimits>(limits, "limits");
        py::array_t<double> deviation(values.size());
        py::array_t<double> change(values.size());
        py::array_t<double> distance(values.size());
        const auto source = span_of(values);
        const auto deviations = writable(deviation);
        const auto changes = writable(change);
        const auto distances = writable(distance);
        {
            const py::gil_scoped_release release;
            const std::lock_guard lock(mutex_);
            test_.compare(source,
                          {.floor = given[0],
                           .own = given[1],
                           .peers = given[2],
                           .cap = given[3],
                           .peer_spread = given[4],
                           .least_peer_spread = given[5],
                           .largest_step = given[6]},
                          deviations, changes, distances);
        }
        return py::make_tuple(deviation, change, distance);
    }

    py::tuple judge(const Array<double>& shift, const Array<double>& relative, const Array<double>& shift_doubt,
                    const Array<double>& relative_doubt, const Array<bool>& usual) {
        py::array_t<bool> known(shift.size());
        py::array_t<bool> over(shift.size());
        py::array_t<double> size(shift.size());
        py::array_t<double> strength(shift.size());
        py::array_t<bool> by_history(shift.size());
        py::array_t<bool> calm(shift.size());
        const detect::ColumnReading reading{.known = flags(known),
                                            .over = flags(over),
                                            .size = writable(size),
                                            .strength = writable(strength),
                                            .by_history = flags(by_history),
                                            .calm = flags(calm)};
        const std::span<const std::uint8_t> may_learn{reinterpret_cast<const std::uint8_t*>(usual.data()),
                                                      static_cast<std::size_t>(usual.size())};
        const auto shifts = span_of(shift);
        const auto relatives = span_of(relative);
        const auto shift_doubts = span_of(shift_doubt);
        const auto relative_doubts = span_of(relative_doubt);
        {
            const py::gil_scoped_release release;
            const std::lock_guard lock(mutex_);
            test_.judge(shifts, relatives, shift_doubts, relative_doubts, may_learn, reading);
        }
        return py::make_tuple(known, over, size, strength, by_history, calm);
    }

  private:
    std::mutex mutex_;
    detect::ColumnTest test_;
};

py::array_t<double> median_of_others(const Array<double>& values, const Array<std::int64_t>& groups) {
    py::array_t<double> found(values.size());
    const auto source = span_of(values);
    const auto of_group = span_of(groups);
    const auto out = writable(found);
    const py::gil_scoped_release release;
    detect::median_of_others(source, of_group, out);
    return found;
}

}  // namespace

void bind_detect(py::module_& module) {
    py::class_<SharedColumnTest>(module, "ColumnTest", "Tests columns against their own levels and their peers.")
        .def(py::init([](const Array<std::int64_t>& peers, std::size_t window, std::int64_t min_history,
                         std::int64_t least_window, double score, const Array<double>& prior_errors) {
                 return std::make_unique<SharedColumnTest>(
                     peers,
                     detect::ColumnSettings{
                         .window = window, .min_history = min_history, .least_window = least_window, .score = score},
                     prior_errors);
             }),
             py::arg("peers"), py::kw_only(), py::arg("window"), py::arg("min_history"), py::arg("least_window"),
             py::arg("score"), py::arg("prior_errors"))
        .def("grow", &SharedColumnTest::grow, py::arg("peers"))
        .def("compare", &SharedColumnTest::compare, py::arg("values"), py::arg("limits"))
        .def("judge", &SharedColumnTest::judge, py::arg("shift"), py::arg("relative"), py::arg("shift_doubt"),
             py::arg("relative_doubt"), py::arg("usual"));
    module.def("median_of_others", &median_of_others, py::arg("values"), py::arg("groups"));
}

}  // namespace megatronapp
