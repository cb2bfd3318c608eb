#include "megatronapp/transport/key_table.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace megatronapp::transport::testing {
namespace {

TEST(KeyTable, AgreesWithAMap) {
    std::mt19937_64 random(7);  // NOLINT(cert-msc32-c,cert-msc51-cpp): the same history in every run
    KeyTable table(1);
    std::map<std::uint64_t, std::uint32_t> model;
    for (int step = 0; step < 50'000; ++step) {
        const std::uint64_t key = random() % (step < 25'000 ? 300 : 30);
        const auto value = static_cast<std::uint32_t>(random());
        if (random() % 2 == 0) {
            EXPECT_EQ(table.insert(key, value), model.emplace(key, value).second);
        } else {
            const auto found = model.find(key);
            EXPECT_EQ(table.contains(key), found != model.end());
            EXPECT_EQ(table.take(key), found == model.end() ? std::nullopt : std::optional(found->second));
            model.erase(key);
        }
        ASSERT_EQ(table.size(), model.size());
    }
}

}  // namespace
}  // namespace megatronapp::transport::testing
