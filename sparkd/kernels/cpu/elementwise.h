// Operations on each row by itself: norms, rotary embedding, gates, sums. sparkd/graph/ops.py says what each one means.
#pragma once

#include "cpu/step.h"

namespace spark {

// `heads` parts of a row; part h begins at `offset` + h * `stride`.
struct Heads {
    int count;
    int dim;
    int stride;
    int offset;
};

class RmsNorm : public Operation {
  public:
    RmsNorm(Value x, const Weight& weight, Value out, float eps);
    void run(Step& step) override;

  private:
    Value x_;
    const float* weight_;
    Value out_;
    float eps_;
};

class QkNorm : public Operation {
  public:
    QkNorm(Value x, const Weight& weight, Value out, Heads heads, float eps);
    void run(Step& step) override;

  private:
    Value x_;
    const float* weight_;
    Value out_;
    Heads heads_;
    float eps_;
};

class Rope : public Operation {
  public:
    Rope(Step& step, Value x, Value out, int heads, int head_dim, size_t table);
    void run(Step& step) override;

  private:
    Value x_, out_;
    int heads_, head_dim_;
    size_t table_;
};

class OutputGate : public Operation {
  public:
    OutputGate(Value x, Value gate, Value out, Heads heads, bool softplus, bool per_head);
    void run(Step& step) override;

  private:
    Value x_, gate_, out_;
    Heads heads_;
    bool softplus_, per_head_;
};

class GatedRmsNorm : public Operation {
  public:
    GatedRmsNorm(Value x, Value gate, const Weight& weight, Value out, int heads, int head_dim, float eps);
    void run(Step& step) override;

  private:
    Value x_, gate_;
    const float* weight_;
    Value out_;
    int heads_, head_dim_;
    float eps_;
};

class SwiGlu : public Operation {
  public:
    SwiGlu(Value gate, Value up, Value out) : gate_(gate), up_(up), out_(out) {}
    void run(Step& step) override;

  private:
    Value gate_, up_, out_;
};

class Add : public Operation {
  public:
    Add(Value x, Value y, Value out) : x_(x), y_(y), out_(out) {}
    void run(Step& step) override;

  private:
    Value x_, y_, out_;
};

}  // namespace spark
