#include "megatronapp/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "megatronapp/quiet_threads.hpp"

namespace megatronapp {
namespace {

std::atomic<std::size_t> allowed_threads{1};
std::atomic<std::size_t> items_of_thread{kLeastItems};
std::atomic<std::size_t> busy_threads{0};

/// Counts the thread of a caller as busy while it exists, and reserves others for it among those that are allowed.
class Helpers {
  public:
    explicit Helpers(std::size_t most) {
        std::size_t busy = ++busy_threads;
        do {
            const std::size_t allowed = allowed_threads;
            count_ = std::min(most, allowed - std::min(busy, allowed));
        } while (!busy_threads.compare_exchange_weak(busy, busy + count_));
    }
    Helpers(const Helpers&) = delete;
    Helpers& operator=(const Helpers&) = delete;
    Helpers(Helpers&&) = delete;
    Helpers& operator=(Helpers&&) = delete;
    ~Helpers() { busy_threads -= count_ + 1; }

    [[nodiscard]] std::size_t count() const { return count_; }

  private:
    std::size_t count_ = 0;
};

}  // namespace

void set_threads(std::size_t count, std::size_t least_items) {
    if (count == 0 || least_items == 0) {
        throw std::invalid_argument("set_threads: there is work for one thread and one item at least");
    }
    allowed_threads = count;
    items_of_thread = least_items;
}

std::size_t parts_of(std::size_t items) {
    return std::clamp<std::size_t>(items / items_of_thread.load(), 1, allowed_threads.load());
}

void in_parts(std::size_t items, std::size_t parts, const PartWork& work) {
    const auto begin_of = [&](std::size_t part) { return items * part / parts; };
    std::vector<std::exception_ptr> failures(parts);
    const auto run = [&](std::size_t part) {
        try {
            work(part, begin_of(part), begin_of(part + 1));
        } catch (...) {
            failures[part] = std::current_exception();
        }
    };
    std::atomic<std::size_t> next{0};
    const auto run_rest = [&] {
        for (std::size_t part = next++; part < parts; part = next++) {
            run(part);
        }
    };
    const Helpers helpers(parts - 1);
    std::vector<std::thread> threads;
    threads.reserve(helpers.count());
    try {
        while (threads.size() < helpers.count()) {
            threads.push_back(quiet_thread(run_rest));
        }
    } catch (const std::exception&) {
        // The system has no more threads or memory for this process: those that there are do all parts.
    }
    run_rest();
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const std::exception_ptr& failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
}

}  // namespace megatronapp
