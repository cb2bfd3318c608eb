#include "megatronapp/detect/column_test.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "megatronapp/detect/medians.hpp"

namespace megatronapp::detect {
namespace {

/// Part of a shift that must show in the column itself, and not only in the others being smaller.
constexpr double kOwnPart = 0.5;
/// Steps over which a level is the plain mean; from then on it forgets, at the rate of the next constant.
constexpr std::int64_t kSettledSteps = 500;
constexpr double kSlowestRate = 1.0 / 2000;
/// Steps below which a measured deviation is about as uncertain as it is large.
constexpr double kFewSteps = 4.0;
/// Steps after which the noise of a column is known well enough to compare it with peers.
constexpr std::size_t kLeastSteps = 4;
/// Steps in a row that may be those of a shift before their windows are learned as noise after all. In two simulated
/// columns whose noise lasts for 20 steps, 41 gave four times as many false shifts, and 9 missed half of those of 2 %.
constexpr std::int64_t kSuspectSteps = 19;
/// Columns from which on the spread between peers is measured and not assumed.
constexpr std::size_t kLeastKnown = 6;

/// Like NumPy's: NaN if either is.
double maximum(double a, double b) { return a >= b || std::isnan(a) ? a : b; }

double zero_if_unknown(double value) { return std::isnan(value) ? 0.0 : value; }

}  // namespace

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
    suspect_.resize(peers.size(), 0);
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
    numbers += peers_.capacity() + learned_.capacity() + calm_.capacity() + suspect_.capacity();
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
        size = clear ? values.grown_size(column, found.best, shift, deviation_[column]) : newest;
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
        const bool is_suspect = found.score >= limit_ / 2 || found.low <= -limit_ / 2;
        learns[column] = is_calm && !is_suspect && std::isfinite(values_[column]) ? 1 : 0;
        reading.calm[column] = is_calm && is_warm && found.score < limit_ && found.low > -limit_ ? 1 : 0;
        follow_shift(column, shift[column], relative[column], found);
        suspect_[column] = is_suspect ? suspect_[column] + 1 : 0;
        // A shift just below the limit, once learned as noise, would raise the limit above it.
        if (reading.calm[column] != 0 && (!is_suspect || suspect_[column] > kSuspectSteps)) {
            add_means(column, found.changed, means);
        }
    }
    learn_levels(learns);
    learn_noise(shift);
    errors_.add(means);
    deviation_.clear();
}

// Add the means of a column's windows to those of a step, from which noise is learned. A window that contains the end
// of a shift would look like noise: windows of calm steps alone are added.
void ColumnTest::add_means(std::size_t column, const ColumnShift& found,
                           std::array<std::vector<double>, kWindows.size()>& means) const {
    for (std::size_t window = 0; window < found.filled; ++window) {
        if (kWindows[window] <= calm_[column]) {
            means[window].push_back(std::abs(found.means[window]));
        }
    }
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
