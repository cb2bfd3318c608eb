#include "detect.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "megatronapp/detect/column_test.hpp"
#include "megatronapp/detect/levels.hpp"
#include "megatronapp/detect/medians.hpp"
#include "megatronapp/detect/messages.hpp"
#include "megatronapp/detect/span_columns.hpp"
#include "megatronapp/parallel.hpp"
#include "megatronapp/rank_records.hpp"

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

    std::size_t memory_bytes() {
        const std::lock_guard lock(mutex_);
        return test_.memory_bytes();
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

py::array_t<double> segment_medians(const Array<std::int64_t>& groups, const Array<double>& values, py::ssize_t count) {
    py::array_t<double> found(std::max<py::ssize_t>(count, 0));
    const auto source = span_of(values);
    const auto of_group = span_of(groups);
    const auto out = writable(found);
    const py::gil_scoped_release release;
    detect::segment_medians(source, of_group, out);
    return found;
}

using WriteMedians = void (*)(std::span<const double>, std::span<double>);

py::array_t<double> medians_along(const Array<double>& table, py::ssize_t axis, WriteMedians write) {
    if (table.ndim() != 2) {
        throw std::invalid_argument("medians: a table has two axes, and this one " + std::to_string(table.ndim()));
    }
    py::array_t<double> found(table.shape(axis));
    const auto source = span_of(table);
    const auto out = writable(found);
    const py::gil_scoped_release release;
    write(source, out);
    return found;
}

py::array_t<double> row_medians(const Array<double>& table) { return medians_along(table, 0, &detect::row_medians); }

py::array_t<double> column_medians(const Array<double>& table) {
    return medians_along(table, 1, &detect::column_medians);
}

py::tuple sort_by_level(const Array<std::int64_t>& source, const Array<std::int64_t>& target, std::size_t events) {
    const auto sources = span_of(source);
    const auto targets = span_of(target);
    detect::LevelOrder found;
    {
        const py::gil_scoped_release release;
        found = detect::sort_by_level(sources, targets, events);
    }
    const auto size = [](const std::vector<std::int64_t>& numbers) { return static_cast<py::ssize_t>(numbers.size()); };
    return py::make_tuple(py::array_t<std::int64_t>(size(found.order), found.order.data()),
                          py::array_t<std::int64_t>(size(found.level_begin), found.level_begin.data()), found.reached);
}

void longest_paths(const Array<std::int64_t>& source, const Array<std::int64_t>& target, const Array<double>& weights,
                   const py::object& times) {
    auto out = py::cast<py::array_t<double, py::array::c_style>>(times);
    if (out.ptr() != times.ptr() || out.ndim() != 2 || weights.ndim() != 2 || out.shape(1) != weights.shape(1)) {
        throw std::invalid_argument(
            "longest_paths: weights and times are contiguous tables of float64 with a column for each scenario");
    }
    const auto sources = span_of(source);
    const auto targets = span_of(target);
    const auto given = span_of(weights);
    const std::span<double> found{out.mutable_data(), static_cast<std::size_t>(out.size())};
    const auto scenarios = static_cast<std::size_t>(weights.shape(1));
    const py::gil_scoped_release release;
    detect::longest_paths(sources, targets, given, scenarios, found);
}

py::array_t<double> latest_times(const Array<std::int64_t>& source, const Array<std::int64_t>& target,
                                 const Array<double>& recorded, const Array<double>& ideal,
                                 const Array<std::uint8_t>& recorded_in, const Array<double>& initial,
                                 std::size_t scenarios) {
    const auto sources = span_of(source);
    const auto targets = span_of(target);
    const auto own = span_of(recorded);
    const auto usual = span_of(ideal);
    const auto sets = span_of(recorded_in);
    const auto begins = span_of(initial);
    std::vector<double> found;
    {
        const py::gil_scoped_release release;
        found = detect::latest_times(sources, targets, own, usual, sets, begins, scenarios);
    }
    return py::array_t<double>(static_cast<py::ssize_t>(found.size()), found.data());
}

/// An array of the memory of a vector, which is not copied.
template <typename Value>
py::array_t<Value> array_of(std::vector<Value> values) {
    auto owner = std::make_unique<std::vector<Value>>(std::move(values));
    const auto* memory = owner.get();
    const py::capsule capsule(owner.release(), [](void* pointer) { delete static_cast<std::vector<Value>*>(pointer); });
    return py::array_t<Value>(static_cast<py::ssize_t>(memory->size()), memory->data(), capsule);
}

py::tuple match_messages(const Array<std::uint8_t>& rows, const Array<std::int64_t>& numbers_of_comms,
                         const Array<std::int64_t>& pairs, const std::array<std::uint8_t, 4>& kinds) {
    if (numbers_of_comms.ndim() != 2 || pairs.ndim() != 2 || pairs.shape(1) != 2) {
        throw std::invalid_argument("match_messages: numbers are of [rank, slot], and pairs of [number, 2]");
    }
    const auto bytes = std::as_bytes(span_of(rows));
    const detect::CommTable comms{.numbers = span_of(numbers_of_comms),
                                  .slots = static_cast<std::size_t>(numbers_of_comms.shape(1)),
                                  .pairs = span_of(pairs)};
    detect::MatchedMessages found;
    {
        const py::gil_scoped_release release;
        found = detect::match_messages(bytes, comms, kinds);
    }
    auto& parts = found.parts;
    return py::make_tuple(array_of(std::move(found.source)), array_of(std::move(found.destination)),
                          array_of(std::move(found.ordinal)), array_of(std::move(parts[0])),
                          array_of(std::move(parts[1])), array_of(std::move(parts[2])), array_of(std::move(parts[3])));
}

py::tuple shortest_transfers(const Array<std::uint8_t>& rows, const Array<std::int64_t>& send,
                             const Array<std::int64_t>& receive, const Array<std::int64_t>& clock_of) {
    const auto bytes = std::as_bytes(span_of(rows));
    const auto sends = span_of(send);
    const auto receives = span_of(receive);
    const auto clocks = span_of(clock_of);
    detect::Transfers found;
    {
        const py::gil_scoped_release release;
        found = detect::shortest_transfers(bytes, sends, receives, clocks);
    }
    return py::make_tuple(array_of(std::move(found.way)), array_of(std::move(found.shortest_ns)));
}

std::array<std::uint8_t, 256> of_kinds(const Array<bool>& kinds) {
    std::array<std::uint8_t, 256> found{};
    if (kinds.size() != static_cast<py::ssize_t>(found.size())) {
        throw std::invalid_argument("a table of kinds has " + std::to_string(kinds.size()) +
                                    " flags; it must have 256");
    }
    std::copy_n(kinds.data(), found.size(), found.begin());
    return found;
}

detect::SpanFormat format_of(const Array<bool>& left_out, std::uint8_t step_kind, std::uint8_t saturated_flag,
                             std::uint8_t run_queue_flag) {
    return {.is_left_out = of_kinds(left_out),
            .step_kind = step_kind,
            .saturated_flag = saturated_flag,
            .run_queue_flag = run_queue_flag};
}

py::tuple summarize_rows(const Array<std::uint8_t>& rows) {
    const auto bytes = std::as_bytes(span_of(rows));
    const auto count = static_cast<py::ssize_t>(bytes.size() / kRankRecordBytes);
    py::array_t<std::uint8_t> kind(count);
    py::array_t<std::int32_t> rank(count);
    const detect::RowColumns columns{.kind = writable(kind), .rank = writable(rank)};
    detect::RowSummary found;
    {
        const py::gil_scoped_release release;
        found = detect::summarize_rows(bytes, columns);
    }
    const py::array_t<std::int64_t> kinds(static_cast<py::ssize_t>(found.count.size()), found.count.data());
    return py::make_tuple(kind, rank, kinds, found.flags, found.greatest_rank, found.least_start);
}

py::tuple stream_rows(const Array<std::uint8_t>& rows, const detect::SpanFormat& format) {
    const auto bytes = std::as_bytes(span_of(rows));
    detect::StreamRows found;
    {
        const py::gil_scoped_release release;
        found = detect::stream_rows(bytes, format);
    }
    return py::make_tuple(array_of(std::move(found.rows)), found.in_order);
}

py::array_t<std::uint8_t> take_rows(const Array<std::uint8_t>& rows, const Array<std::int64_t>& numbers_of_rows) {
    py::array_t<std::uint8_t> taken(numbers_of_rows.size() * static_cast<py::ssize_t>(kRankRecordBytes));
    const auto bytes = std::as_bytes(span_of(rows));
    const auto chosen = span_of(numbers_of_rows);
    const auto out = std::as_writable_bytes(writable(taken));
    {
        const py::gil_scoped_release release;
        detect::take_rows(bytes, chosen, out);
    }
    return taken;
}

py::tuple span_columns(const Array<std::uint8_t>& rows, std::int64_t origin_ns, const detect::SpanFormat& format) {
    const auto bytes = std::as_bytes(span_of(rows));
    const auto count = static_cast<py::ssize_t>(bytes.size() / kRankRecordBytes);
    py::array_t<double> start(count);
    py::array_t<double> end(count);
    py::array_t<double> duration(count);
    py::array_t<double> queue(count);
    py::array_t<std::int64_t> rank(count);
    py::array_t<std::uint8_t> kind(count);
    py::array_t<std::uint8_t> flags(count);
    const detect::SpanColumns columns{.start = writable(start),
                                      .end = writable(end),
                                      .duration = writable(duration),
                                      .queue = writable(queue),
                                      .rank = writable(rank),
                                      .kind = writable(kind),
                                      .flags = writable(flags)};
    {
        const py::gil_scoped_release release;
        detect::write_columns(bytes, origin_ns, format, columns);
    }
    return py::make_tuple(start, end, duration, queue, rank, kind, flags);
}

py::array_t<std::uint8_t> shift_starts(const Array<std::uint8_t>& rows, const Array<std::int64_t>& offset_ns,
                                       const Array<std::int64_t>& device_ns, std::uint8_t device_flag,
                                       const Array<bool>& host_kinds) {
    const auto bytes = std::as_bytes(span_of(rows));
    const detect::ClockShift shift{.offset_ns = span_of(offset_ns),
                                   .device_ns = span_of(device_ns),
                                   .device_flag = device_flag,
                                   .is_of_host = of_kinds(host_kinds)};
    py::array_t<std::uint8_t> shifted(rows.size());
    const auto out = std::as_writable_bytes(writable(shifted));
    {
        const py::gil_scoped_release release;
        detect::shift_starts(bytes, shift, out);
    }
    return shifted;
}

}  // namespace

void bind_detect(py::module_& module) {
    module.def("set_threads", &set_threads, py::arg("count"), py::arg("least_items") = kLeastItems);
    py::class_<SharedColumnTest>(module, "ColumnTest", "Tests columns against their own levels and their peers.")
        .def(py::init([](const Array<std::int64_t>& peers, std::size_t window, std::int64_t min_history,
                         std::int64_t least_window, double independent_tests, const Array<double>& prior_errors) {
                 return std::make_unique<SharedColumnTest>(
                     peers,
                     detect::ColumnSettings{.window = window,
                                            .min_history = min_history,
                                            .least_window = least_window,
                                            .independent_tests = independent_tests},
                     prior_errors);
             }),
             py::arg("peers"), py::kw_only(), py::arg("window"), py::arg("min_history"), py::arg("least_window"),
             py::arg("independent_tests"), py::arg("prior_errors"))
        .def("grow", &SharedColumnTest::grow, py::arg("peers"))
        .def_property_readonly("memory_bytes", &SharedColumnTest::memory_bytes)
        .def("compare", &SharedColumnTest::compare, py::arg("values"), py::arg("limits"))
        .def("judge", &SharedColumnTest::judge, py::arg("shift"), py::arg("relative"), py::arg("shift_doubt"),
             py::arg("relative_doubt"), py::arg("usual"));
    py::class_<detect::SpanFormat>(module, "SpanFormat", "Numbers of the format of records.")
        .def(py::init(&format_of), py::kw_only(), py::arg("left_out"), py::arg("step_kind"), py::arg("saturated_flag"),
             py::arg("run_queue_flag"));
    module.def("summarize_rows", &summarize_rows, py::arg("rows"));
    module.def("stream_rows", &stream_rows, py::arg("rows"), py::arg("format"));
    module.def("take_rows", &take_rows, py::arg("rows"), py::arg("numbers"));
    module.def("span_columns", &span_columns, py::arg("rows"), py::arg("origin_ns"), py::arg("format"));
    module.def("shift_starts", &shift_starts, py::arg("rows"), py::arg("offset_ns"), py::arg("device_ns"),
               py::arg("device_flag"), py::arg("host_kinds"));
    module.def("match_messages", &match_messages, py::arg("rows"), py::arg("numbers"), py::arg("pairs"),
               py::arg("kinds"));
    module.def("shortest_transfers", &shortest_transfers, py::arg("rows"), py::arg("send"), py::arg("receive"),
               py::arg("clock_of"));
    module.def("longest_paths", &longest_paths, py::arg("source"), py::arg("target"), py::arg("weights"),
               py::arg("times"));
    module.def("latest_times", &latest_times, py::arg("source"), py::arg("target"), py::arg("recorded"),
               py::arg("ideal"), py::arg("recorded_in"), py::arg("initial"), py::arg("scenarios"));
    module.def("column_medians", &column_medians, py::arg("table"));
    module.def("row_medians", &row_medians, py::arg("table"));
    module.def("segment_medians", &segment_medians, py::arg("groups"), py::arg("values"), py::arg("count"));
    module.def("sort_by_level", &sort_by_level, py::arg("source"), py::arg("target"), py::arg("events"));
    module.def("median_of_others", &median_of_others, py::arg("values"), py::arg("groups"));
}

}  // namespace megatronapp
