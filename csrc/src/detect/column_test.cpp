#include "megatronapp/detect/column_test.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {
namespace {

constexpr double kMadToSigma = 1.4826;
/// Deviations to which a single value is limited, so that a disturbed step weighs no more than a few others.
constexpr double kClip = 8.0;
constexpr double kLargestError = 2.0;
constexpr double kMemory = 0.99;
constexpr double kPriorWeight = 20.0;
/// Newest steps that must agree with a shift for it to be there now.
constexpr std::int64_t kRecent = 4;
/// Part of a shift that must show in the column itself, and not only in the others being smaller.
constexpr double kOwnPart = 0.5;
/// Steps over which a level is the plain mean; from then on it forgets, at the rate of the next constant.
constexpr std::int64_t kSettledSteps = 500;
constexpr double kSlowestRate = 1.0 / 2000;
/// Steps below which a measured deviation is about as uncertain as it is large.
constexpr double kFewSteps = 4.0;
/// Steps after which the noise of a column is known well enough to compare it with peers.
constexpr std::size_t kLeastSteps = 4;
/// Columns from which on the spread between peers is measured and not assumed.
constexpr std::size_t kLeastKnown = 6;

/// Like NumPy's: NaN if either is.
double maximum(double a, double b) { return a >= b || std::isnan(a) ? a : b; }

double zero_if_unknown(double value) { return std::isnan(value) ? 0.0 : value; }

double square(double value) { return value * value; }

}  // namespace

MeanErrors::MeanErrors(const std::array<double, kWindows.size()>& prior) {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        squares_[window] = kPriorWeight * square(prior[window]);
        weights_[window] = kPriorWeight;
    }
    update();
}

void MeanErrors::add(std::array<std::vector<double>, kWindows.size()>& means) {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        if (means[window].empty()) {
            continue;
        }
        const double middle = kMadToSigma * median(means[window]);
        squares_[window] = kMemory * squares_[window] + square(std::min(middle, kLargestError));
        weights_[window] = kMemory * weights_[window] + 1.0;
    }
    update();
}

void MeanErrors::update() {
    for (std::size_t window = 0; window < kWindows.size(); ++window) {
        const double least = 1.0 / std::sqrt(static_cast<double>(kWindows[window]));
        value_[window] = std::max(std::sqrt(squares_[window] / weights_[window]), least);
    }
    std::size_t below = 0;
    for (std::size_t steps = 1; steps <= kLongest; ++steps) {
        if (below + 1 < kWindows.size() && static_cast<std::size_t>(kWindows[below + 1]) <= steps) {
            ++below;
        }
        const auto past = static_cast<double>(static_cast<std::int64_t>(steps) - kWindows[below]);
        if (past == 0) {
            of_steps_[steps] = value_[below];
            continue;
        }
        const auto length = static_cast<double>(kWindows[below + 1] - kWindows[below]);
        of_steps_[steps] = (value_[below + 1] - value_[below]) / length * past + value_[below];
    }
}

double MeanErrors::over(std::int64_t steps) const {
    const auto longest = static_cast<std::int64_t>(kLongest);
    const double inside = of_steps_[static_cast<std::size_t>(std::clamp<std::int64_t>(steps, 1, longest))];
    return inside * std::sqrt(static_cast<double>(longest) / static_cast<double>(std::max(steps, longest)));
}

void RecentValues::grow(std::size_t columns) {
    values_.resize(columns * kLongest, 0.0);
    newest_.resize(columns, 0);
    count_.resize(columns, 0);
}

void RecentValues::add(std::size_t column, double value) {
    newest_[column] = static_cast<std::uint8_t>((newest_[column] + kLongest - 1) % kLongest);
    values_[(column * kLongest) + newest_[column]] = value;
    ++count_[column];
}

double RecentValues::at(std::size_t column, std::size_t age) const {
    return values_[(column * kLongest) + ((newest_[column] + age) % kLongest)];
}

ColumnShift RecentValues::test(std::size_t column, double deviation, double bias, const MeanErrors& errors) const {
    ColumnShift found;
    const double offset = bias / deviation;
    const double limit = kClip * std::sqrt(1.0 + square(offset));
    double best = -std::numeric_limits<double>::infinity();
    double lowest = std::numeric_limits<double>::infinity();
    double sum = 0.0;
    std::size_t age = 0;
    for (; found.filled < kWindows.size() && kWindows[found.filled] <= count_[column]; ++found.filled) {
        const std::size_t window = found.filled;
        for (; age < static_cast<std::size_t>(kWindows[window]); ++age) {
            sum += std::min(std::max(at(column, age) / deviation, -limit), limit);
        }
        found.means[window] = sum / static_cast<double>(kWindows[window]);
        const double ratio = found.means[window] / std::sqrt(square(errors.value()[window]) + square(offset));
        if (ratio > best) {
            best = ratio;
            found.best = window;
        }
        if (ratio < lowest) {
            lowest = ratio;
            found.worst = window;
        }
    }
    found.score = std::isfinite(best) ? best : 0.0;
    found.lowest = found.filled < kWindows.size() ? std::min(lowest, 0.0) : lowest;
    return found;
}

double RecentValues::median_of(std::size_t column, std::size_t window) const {
    std::array<double, kLongest> values{};
    const auto length = static_cast<std::size_t>(kWindows[window]);
    for (std::size_t age = 0; age < length; ++age) {
        values[age] = at(column, age);
    }
    return median(std::span(values).first(length));
}

bool RecentValues::is_recent(std::size_t column, const ColumnShift& shift, double size, double deviation,
                             const MeanErrors& errors) const {
    const std::int64_t steps = std::min(kWindows[shift.best], kRecent);
    double sum = 0.0;
    for (std::size_t age = 0; age < static_cast<std::size_t>(steps); ++age) {
        sum += at(column, age);
    }
    const double mean = sum / static_cast<double>(steps);
    const double least = 0.5 * size - 2.0 * deviation * errors.over(steps);
    if (!(mean > least && mean > 0) || !(at(column, 0) > 0.5 * size - 2.0 * deviation)) {
        return false;
    }
    return steps < 2 || (at(column, 0) + at(column, 1)) / 2 > 0.5 * size - 1.4 * deviation;
}

void SortedHistory::grow(std::size_t columns) {
    ring_.resize(columns * window_);
    sorted_.resize(columns * window_);
    next_.resize(columns, 0);
}

std::size_t SortedHistory::count(std::size_t column) const {
    return std::min(static_cast<std::size_t>(next_[column]), window_);
}

void SortedHistory::add(std::size_t column, double value) {
    const std::span<double> sorted = std::span(sorted_).subspan(column * window_, window_);
    double& oldest = ring_[(column * window_) + (static_cast<std::size_t>(next_[column]) % window_)];
    std::size_t filled = count(column);
    if (filled == window_) {
        const auto place = std::ranges::lower_bound(sorted, oldest);
        std::copy(place + 1, sorted.end(), place);
        --filled;
    }
    const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(filled);
    const auto place = std::upper_bound(sorted.begin(), end, value);
    std::copy_backward(place, end, end + 1);
    *place = oldest = value;
    ++next_[column];
}

double SortedHistory::deviation(std::size_t column) const {
    const std::size_t filled = count(column);
    if (filled == 0) {
        return kUnknown;
    }
    const std::span<const double> sorted = std::span(sorted_).subspan(column * window_, filled);
    const std::size_t middle = (filled - 1) / 2;
    const double center = sorted[middle];
    // The two sides of the center are sorted by distance: step to the nearer of both until half are passed.
    std::size_t below = middle;  // one more than the next on the left
    std::size_t above = middle;  // the next on the right
    double distance = 0.0;
    for (std::size_t passed = 0; passed <= middle; ++passed) {
        const double left = below > 0 ? center - sorted[below - 1] : std::numeric_limits<double>::infinity();
        const double right = above < filled ? sorted[above] - center : std::numeric_limits<double>::infinity();
        if (left < right) {
            distance = left;
            --below;
        } else {
            distance = right;
            ++above;
        }
    }
    return distance;
}

struct ColumnTest::Side {
    bool known;
    bool over;
    double size;
    double strength;
};

struct ColumnTest::Judged {
    ColumnShift changed;
    Side side;
    bool by_history;
    double score;
    double low;
};

ColumnTest::ColumnTest(std::span<const std::int64_t> peers, const ColumnSettings& settings,
                       const std::array<double, kWindows.size()>& prior_errors)
    : settings_(settings), residuals_(settings.window), errors_(prior_errors) {
    if (settings.window == 0) {
        throw std::invalid_argument("ColumnTest: a history needs a window of at least one step");
    }
    if (!(settings.independent_tests >= 1.0)) {
        throw std::invalid_argument("ColumnTest: independent_tests is " + std::to_string(settings.independent_tests) +
                                    "; write 1 or more");
    }
    grow(peers);
}

void ColumnTest::grow(std::span<const std::int64_t> peers) {
    if (peers.size() < columns()) {
        throw std::invalid_argument("ColumnTest: " + std::to_string(peers.size()) + " columns are fewer than the " +
                                    std::to_string(columns()) + " before");
    }
    peers_.assign(peers.begin(), peers.end());
    level_.resize(peers.size(), kUnknown);
    before_.resize(peers.size(), kUnknown);
    last_.resize(peers.size());
    calm_.resize(peers.size(), 0);
    learned_.resize(peers.size(), 0);
    offset_.resize(peers.size(), kUnknown);
    residuals_.grow(peers.size());
    shifts_.grow(peers.size());
    distances_.grow(peers.size());
    limit_ = std::sqrt(
        2.0 * std::log(settings_.independent_tests * static_cast<double>(std::max<std::size_t>(peers.size(), 2))));
}

std::size_t ColumnTest::memory_bytes() const {
    std::size_t numbers = 0;
    for (const auto* column : {&level_, &offset_, &before_, &values_, &own_, &distance_, &deviation_}) {
        numbers += column->capacity();
    }
    numbers += peers_.capacity() + learned_.capacity() + calm_.capacity();
    return (numbers * sizeof(double)) + (last_.capacity() * sizeof(LastShift)) + residuals_.memory_bytes() +
           shifts_.memory_bytes() + distances_.memory_bytes();
}

void ColumnTest::check(std::size_t size, const char* name) const {
    if (size != columns()) {
        throw std::invalid_argument("ColumnTest: " + std::string(name) + " has " + std::to_string(size) +
                                    " numbers for " + std::to_string(columns()) + " columns");
    }
}

double ColumnTest::deviation_of(std::size_t column, double floor) const {
    const auto count = static_cast<double>(std::max<std::size_t>(residuals_.count(column), 1));
    return std::fmax(kMadToSigma * residuals_.deviation(column) * (1.0 + kFewSteps / count), floor);
}

void ColumnTest::compare(std::span<const double> values, const ColumnLimits& limits, std::span<double> deviation,
                         std::span<double> change, std::span<double> distance) {
    check(values.size(), "values");
    check(deviation.size(), "deviation");
    check(change.size(), "change");
    check(distance.size(), "distance");
    limits_ = limits;
    values_.assign(values.begin(), values.end());
    own_.resize(columns());
    std::vector<double> known;
    for (std::size_t column = 0; column < columns(); ++column) {
        level_[column] = std::isnan(level_[column]) ? values[column] : level_[column];
        own_[column] = values[column] - level_[column];
        if (std::isfinite(own_[column])) {
            known.push_back(own_[column]);
        }
        deviation[column] = deviation_of(column, limits.floor);
    }
    const MedianOfOthers others(known);
    known.assign(deviation.begin(), deviation.end());
    const double usual = median(known);
    median_of_others(values, peers_, distance);
    for (std::size_t column = 0; column < columns(); ++column) {
        const double own = own_[column];
        change[column] = own - (std::isfinite(own) ? zero_if_unknown(others.without(own)) : 0.0);
        distance[column] = peers_[column] >= 0 ? values[column] - distance[column] : kUnknown;
        deviation[column] = std::max(deviation[column], usual);
    }
    deviation_.assign(deviation.begin(), deviation.end());
    distance_.assign(distance.begin(), distance.end());
}

double ColumnTest::peer_spread() const {
    std::vector<double> known;
    for (std::size_t column = 0; column < columns(); ++column) {
        if (std::isfinite(offset_[column]) && learned_[column] >= settings_.min_history) {
            known.push_back(std::abs(offset_[column]));
        }
    }
    if (known.size() < kLeastKnown) {
        return limits_.peer_spread;
    }
    return std::max(kMadToSigma * median(known), limits_.least_peer_spread);
}

ColumnTest::Side ColumnTest::side(const RecentValues& values, std::size_t column, const ColumnShift& found,
                                  double newest, double least, double doubt) const {
    if (!std::isfinite(newest)) {
        return {.known = false, .over = false, .size = 0.0, .strength = 0.0};
    }
    bool clear = found.score > limit_ && kWindows[found.best] >= settings_.least_window;
    double size = newest;
    if (clear) {  // medians are for the few columns that need them
        const double shift = values.median_of(column, found.best);
        clear = shift > least && values.is_recent(column, found, shift, deviation_[column], errors_);
        size = clear ? shift : newest;
    }
    const bool is_extreme =
        settings_.least_window <= 1 && newest > maximum(std::max(limits_.cap, least), least + doubt);
    return {.known = true, .over = clear || is_extreme, .size = size, .strength = found.score / limit_};
}

ColumnTest::Judged ColumnTest::judge_column(std::size_t column, double shift, double relative, double shift_doubt,
                                            double relative_doubt, double spread) const {
    const bool is_warm = learned_[column] >= settings_.min_history;
    const double deviation = deviation_[column];
    const ColumnShift changed = shifts_.test(column, deviation, deviation * errors_.over(learned_[column]), errors_);
    const ColumnShift distant = distances_.test(column, deviation, spread, errors_);
    constexpr Side kNone{.known = false, .over = false, .size = 0.0, .strength = 0.0};
    Side history = side(shifts_, column, changed, shift, limits_.own, shift_doubt);
    if (!is_warm || !(own_[column] > kOwnPart * history.size - 2.0 * deviation)) {
        history = kNone;
    }
    Side compared = side(distances_, column, distant, relative, limits_.peers, relative_doubt);
    if (!(relative > limits_.cap) && residuals_.count(column) < kLeastSteps) {
        compared = kNone;
    }
    const bool is_by_peers = compared.over && (!history.over || compared.size > history.size);
    const bool is_by_history = history.known && !is_by_peers;
    Side chosen = is_by_history ? history : compared;
    chosen.known = history.known || compared.known;
    return {.changed = changed,
            .side = chosen,
            .by_history = is_warm && is_by_history,
            .score = std::max(is_warm ? changed.score : 0.0, distant.score),
            .low = is_warm ? changed.lowest : 0.0};
}

void ColumnTest::judge(std::span<const double> shift, std::span<const double> relative,
                       std::span<const double> shift_doubt, std::span<const double> relative_doubt,
                       std::span<const std::uint8_t> usual, const ColumnReading& reading) {
    check(shift.size(), "shift");
    check(relative.size(), "relative");
    check(shift_doubt.size(), "shift_doubt");
    check(relative_doubt.size(), "relative_doubt");
    check(usual.size(), "usual");
    check(reading.calm.size(), "calm");
    check(deviation_.size(), "the step that compare() has begun");
    const double spread = peer_spread();
    std::vector<std::uint8_t> learns(columns());
    std::array<std::vector<double>, kWindows.size()> means;
    for (std::size_t column = 0; column < columns(); ++column) {
        const bool is_warm = learned_[column] >= settings_.min_history;
        add_values(column, is_warm ? shift[column] - shift_doubt[column] : kUnknown,
                   relative[column] - relative_doubt[column]);
        const Judged found =
            judge_column(column, shift[column], relative[column], shift_doubt[column], relative_doubt[column], spread);
        reading.known[column] = found.side.known ? 1 : 0;
        reading.over[column] = found.side.over ? 1 : 0;
        reading.size[column] = found.side.size;
        reading.strength[column] = found.side.strength;
        reading.by_history[column] = found.by_history ? 1 : 0;
        const bool is_calm = !found.side.over && usual[column] != 0;
        const double half = limit_ / 2;
        learns[column] = is_calm && found.score < half && found.low > -half && std::isfinite(values_[column]) ? 1 : 0;
        reading.calm[column] = is_calm && is_warm && found.score < limit_ && found.low > -limit_ ? 1 : 0;
        follow_shift(column, shift[column], relative[column], found);
        // Noise is learned from windows of calm steps alone: those that contain the end of a shift would look like it.
        for (std::size_t window = 0; reading.calm[column] != 0 && window < found.changed.filled; ++window) {
            if (kWindows[window] <= calm_[column]) {
                means[window].push_back(std::abs(found.changed.means[window]));
            }
        }
    }
    learn_levels(learns);
    learn_noise(shift);
    errors_.add(means);
    deviation_.clear();
}

// Forget a shift of which the newest steps show no sign. The windows that contain it would stay above the limit: a
// smaller shift would not be seen, and in a job of two columns what they contain would at last be learned as noise.
// Of two columns each is compared with the other, so that the shift of one is that of the other, downwards.
void ColumnTest::follow_shift(std::size_t column, double shift, double relative, const Judged& found) {
    LastShift& last = last_[column];
    const double margin = 2.0 * deviation_[column];
    if (found.side.over) {
        last = {.size = found.side.size, .is_by_history = found.by_history, .ended = 0};
        calm_[column] = 0;
        return;
    }
    if (found.low < -limit_) {
        const double size = shifts_.median_of(column, found.changed.worst);
        if (size < -limits_.own && shift < 0.5 * size + margin) {
            last = {.size = size, .is_by_history = true, .ended = 0};
            calm_[column] = 0;
            return;
        }
    }
    calm_[column] += std::isfinite(shift) ? 1 : 0;
    const double value = last.is_by_history ? shift : relative;
    if (std::isnan(last.size) || !std::isfinite(value)) {
        return;
    }
    const bool has_ended = last.size > 0 ? value < 0.5 * last.size - margin : value > 0.5 * last.size + margin;
    last.ended = has_ended ? last.ended + 1 : 0;
    if (last.ended == kRecent && settings_.least_window <= 1) {
        shifts_.keep(column, kRecent);
        distances_.keep(column, kRecent);
        last = {};
    }
}

void ColumnTest::add_values(std::size_t column, double change, double distance) {
    if (std::isfinite(change)) {
        shifts_.add(column, change);
    }
    if (std::isfinite(distance)) {
        distances_.add(column, distance);
    }
}

void ColumnTest::learn_noise(std::span<const double> shift) {
    for (std::size_t column = 0; column < columns(); ++column) {
        if (const double value = (shift[column] - before_[column]) / std::sqrt(2.0); std::isfinite(value)) {
            residuals_.add(column, value);
        }
        before_[column] = std::isfinite(shift[column]) ? shift[column] : before_[column];
    }
}

void ColumnTest::learn_levels(std::span<const std::uint8_t> learns) {
    std::vector<double> healthy;
    for (std::size_t column = 0; column < columns(); ++column) {
        if (learns[column] != 0 && std::isfinite(own_[column])) {
            healthy.push_back(own_[column]);
        }
    }
    const auto is_known = [](double own) { return std::isfinite(own); };
    if (healthy.size() == 1 && std::ranges::count_if(own_, is_known) > 1) {
        return;  // without others, what all have in common is not known
    }
    const MedianOfOthers others(healthy);
    for (std::size_t column = 0; column < columns(); ++column) {
        if (learns[column] == 0) {
            continue;
        }
        const std::int64_t learned = ++learned_[column];
        const double rate = learned < kSettledSteps ? 1.0 / static_cast<double>(learned) : kSlowestRate;
        const double change = own_[column] - zero_if_unknown(others.without(own_[column]));
        const double limited = std::min(std::max(change, -limits_.largest_step), limits_.largest_step);
        level_[column] = level_[column] + rate * zero_if_unknown(limited);
        if (const double distance = distance_[column]; std::isfinite(distance)) {  // else its peers are lost this time
            const double before = offset_[column];
            offset_[column] = std::isnan(before) ? distance : before + rate * (distance - before);
        }
    }
}

}  // namespace megatronapp::detect
