// Experts of a device's step that the CPU computes, called by the device's driver between two kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/experts.h"

namespace spark {

// A device says in host memory what it wants, and reads it there when a call has ended. `told` is int32: the number of
// rows, then [rows][top_k] an expert, or -1 where the device computes it; `x` [rows][width] of rows that want any;
// `results` [rows][top_k][out width] of what was wanted.
class HostExperts {
  public:
    // Calls of at most `max_rows` rows. All memory outlives this.
    HostExperts(int64_t max_rows, int threads, int top_k, const int32_t* told, const float* x, float* results);

    // Adds a layer: pieces as `Experts` takes them, the address of each record. What its calls are told (`call`).
    void* add_layer(const Weight& gate, const Weight& up, const Weight& down, const std::vector<uint64_t>& records);

    // Computes for a layer, told by what `add_layer` gave: for any thread, one at a time. Nothing is thrown: after the
    // first failure calls do nothing, and `failure` says what it was.
    static void call(void* layer) noexcept;
    // Empty: none. To be asked while no call runs.
    const std::string& failure() const { return failure_; }

  private:
    struct Layer {
        HostExperts* owner;
        size_t number;
        int width;
        std::unique_ptr<Experts> experts;
    };

    void compute(Layer& layer);

    Step step_;
    const int32_t* told_;
    const float* x_;
    float* results_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::string failure_;
};

}  // namespace spark
