// Embedding, matrix products, and the head.
#pragma once

#include "cpu/step.h"

namespace spark {

// out[row][o] = weight row o · x row, for all rows of `x`. `out_width` floats lie between rows of `out`.
void multiply(Step& step, const Weight& weight, const Activations& x, int64_t rows, float* out, int64_t out_width);

class Embed : public Operation {
  public:
    Embed(const Weight& weight, Value out);
    void run(Step& step) override;

  private:
    Weight weight_;
    Value out_;
};

class Linear : public Operation {
  public:
    Linear(Step& step, Value x, const Weight& weight, Value out);
    void run(Step& step) override;

  private:
    Value x_;
    Weight weight_;
    Value out_;
};

class Logits : public Operation {
  public:
    Logits(Step& step, Value x, const Weight& weight);
    void run(Step& step) override;

  private:
    Value x_;
    Weight weight_;
};

}  // namespace spark
