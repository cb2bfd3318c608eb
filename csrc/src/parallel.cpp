#include "megatronapp/parallel.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "megatronapp/quiet_threads.hpp"

namespace megatronapp {
namespace {

std::atomic<std::size_t> allowed_threads{1};
std::atomic<std::size_t> items_of_thread{kLeastItems};

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
    std::vector<std::thread> threads;
    threads.reserve(parts - 1);
    std::size_t part = 1;
    try {
        for (; part < parts; ++part) {
            threads.push_back(quiet_thread([&run, part] { run(part); }));
        }
    } catch (const std::system_error&) {
        // The system has no more threads for this process: the caller does what is left, with the same result.
        for (; part < parts; ++part) {
            run(part);
        }
    }
    run(0);
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
