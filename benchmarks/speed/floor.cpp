// One round of FedAvg written in C++ for one model: how fast the same round could be.
//
// In a round every client takes the server's weights and trains a GCN (features -> 128 -> classes)
// for some epochs: full batch, ReLU, dropout of 0.5 or none, mean cross-entropy, Adam that starts
// anew, L2 penalty in the gradient. Then the client's own model predicts its validation and test
// rows, and the server's weights become the mean, weighted by training rows. At last the server's
// model predicts the same rows at every client. What silograph does besides is left out: counts
// for F1 and AUC, losses of validation and test rows, messages, checks, the ledger.
//
// Two shortcuts that silograph also has. A client trains only the rows of the first matrix whose
// features occur at it. The other rows move by the L2 penalty alone, in the same way at every
// client, so they are computed once.
//
//     g++ -O3 -march=native -ffast-math floor.cpp -o floor
//     ./floor INPUT EPOCHS DROPOUT
//
// INPUT is written by floor.py, int32 and float32 in the order of `read_input`. Lines on standard
// input are commands: `rounds N` runs N rounds and answers with their seconds by the wall clock and
// of CPU; `weights FILE` writes the server's weights and answers with the share of correct test
// rows of the own models and of the server's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int H = 128;   // width
constexpr int K = 16;    // most classes; rows of logits are padded to it
constexpr int LANES = 16;
constexpr float RATE = 0.01f, DECAY = 5e-4f, BETA1 = 0.9f, BETA2 = 0.999f, EPSILON = 1e-8f;

using Floats = std::vector<float>;
using Ints = std::vector<int>;
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// A row of H floats that stays in registers while rows are added to it.
struct Row {
  Vector part[H / LANES] = {};
  void add(float factor, const float* row) {
#pragma GCC unroll 8
    for (int i = 0; i < H / LANES; i++) part[i] += factor * load(row + LANES * i);
  }
  void write(float* row) const {
#pragma GCC unroll 8
    for (int i = 0; i < H / LANES; i++) store(row + LANES * i, part[i]);
  }
};

// A sparse matrix in CSR.
struct Sparse {
  Ints start, column;
  Floats value;
};

struct Client {
  int rows;
  Ints features;         // those that occur here, ascending; columns of x are places among them
  Sparse x, transposed;  // (rows, features) and (features, rows)
  Sparse adjacency;      // (rows, rows), normalized, with loops, symmetric
  Ints label, train, val, test;
};

struct Weights {
  Floats w1, b1, w2, b2;  // (features, H), (H), (H, K), (K)
};

// First and second moments of one array.
struct Moments {
  Floats first, second;
  explicit Moments(size_t size = 0) : first(size), second(size) {}
};

// Adam's factors in one step.
struct Step {
  float rate, correction;
  explicit Step(int number)
      : rate(RATE / (1 - std::pow(BETA1, number))), correction(1 / (1 - std::pow(BETA2, number))) {}
};

inline void adam(float* __restrict__ w, float* __restrict__ first, float* __restrict__ second,
                 const float* __restrict__ gradient, size_t size, Step s) {
  for (size_t i = 0; i < size; i++) {
    first[i] = BETA1 * first[i] + (1 - BETA1) * gradient[i];
    second[i] = BETA2 * second[i] + (1 - BETA2) * gradient[i] * gradient[i];
    w[i] -= s.rate * first[i] / (std::sqrt(second[i] * s.correction) + EPSILON);
  }
}

// Arrays of the second layer and biases: gradient with the L2 penalty, then the step.
void adam(Floats& w, Moments& m, Floats& gradient, Step s) {
  for (size_t i = 0; i < w.size(); i++) gradient[i] += DECAY * w[i];
  adam(w.data(), m.first.data(), m.second.data(), gradient.data(), w.size(), s);
}

template <class T>
std::vector<T> read(FILE* file, size_t size) {
  std::vector<T> values(size);
  if (size && std::fread(values.data(), sizeof(T), size, file) != size) std::exit(2);
  return values;
}

Sparse read_sparse(FILE* file, int rows) {
  Sparse s;
  s.start = read<int>(file, rows + 1);
  s.column = read<int>(file, s.start[rows]);
  s.value = read<float>(file, s.start[rows]);
  return s;
}

Sparse transpose(const Sparse& s, int rows, int columns) {
  Sparse t{Ints(columns + 1), Ints(s.column.size()), Floats(s.value.size())};
  for (int c : s.column) t.start[c + 1]++;
  for (int c = 0; c < columns; c++) t.start[c + 1] += t.start[c];
  Ints next(t.start);
  for (int r = 0; r < rows; r++)
    for (int e = s.start[r]; e < s.start[r + 1]; e++) {
      int place = next[s.column[e]]++;
      t.column[place] = r;
      t.value[place] = s.value[e];
    }
  return t;
}

// out (rows, H) = s x + bias; row c of x is at place[c], or at c if there are no places.
void multiply(const Sparse& s, int rows, const float* x, const int* place, const float* bias,
              float* out) {
  for (int r = 0; r < rows; r++) {
    Row sum;
    if (bias) sum.add(1, bias);
    for (int e = s.start[r]; e < s.start[r + 1]; e++) {
      int c = s.column[e];
      sum.add(s.value[e], x + size_t(place ? place[c] : c) * H);
    }
    sum.write(out + size_t(r) * H);
  }
}

// The same for rows of K.
void multiply_logits(const Sparse& s, int rows, const float* x, const float* bias, float* out) {
  for (int r = 0; r < rows; r++) {
    Vector sum = {};
    if (bias) sum = load(bias);
    for (int e = s.start[r]; e < s.start[r + 1]; e++)
      sum += s.value[e] * load(x + size_t(s.column[e]) * K);
    store(out + size_t(r) * K, sum);
  }
}

// A row (H) after ReLU; with dropout entries whose bit is 0 become 0, the others double.
inline void relu(float* row) {
  for (int j = 0; j < H; j++) row[j] = std::max(row[j], 0.f);
}

inline void relu_dropout(float* row, uint64_t (*random)()) {
  for (int half = 0; half < H; half += 64) {
    uint64_t bits = random();
#ifdef __AVX512F__
    for (int j = half; j < half + 64; j += 16, bits >>= 16) {
      __m512 x = _mm512_loadu_ps(row + j);
      __mmask16 keep = __mmask16(bits) & _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
      _mm512_storeu_ps(row + j, _mm512_maskz_add_ps(keep, x, x));
    }
#else
    for (int j = half; j < half + 64; j++, bits >>= 1)
      row[j] = (bits & 1) && row[j] > 0 ? 2 * row[j] : 0;
#endif
  }
}

uint64_t random_bits() {  // xorshift
  static uint64_t state = 88172645463325252ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

struct Federation {
  int epochs, num_features, num_classes;
  bool dropout;
  std::vector<Client> clients;
  Weights server, mean;
  Moments unused_moments;  // of rows that a client has no feature for
  Floats unused, share;    // these rows after training; a feature's share of training rows
  // Scratch, for the largest client.
  Floats w, first, second, product, hidden, hidden_gradient, projected, logits, logit_gradient;
  long own_hits[2] = {}, server_hits[2] = {}, judged[2] = {};  // validation, test

  void predict(const Client& c, const float* w1, const int* place, const Weights& rest,
               bool training) {
    multiply(c.x, c.rows, w1, place, nullptr, product.data());
    multiply(c.adjacency, c.rows, product.data(), nullptr, rest.b1.data(), hidden.data());
    for (int r = 0; r < c.rows; r++) {
      float* h = &hidden[size_t(r) * H];
      if (training && dropout) relu_dropout(h, random_bits);
      else relu(h);
      Vector sum[4] = {};
      const float* w2 = rest.w2.data();
      for (int j = 0; j < H; j += 4)
        for (int i = 0; i < 4; i++) sum[i] += h[j + i] * load(w2 + (j + i) * K);
      store(&projected[size_t(r) * K], (sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    multiply_logits(c.adjacency, c.rows, projected.data(), rest.b2.data(), logits.data());
  }

  void count_hits(const Client& c, long* hits) const {
    for (int part = 0; part < 2; part++)
      for (int r : part ? c.test : c.val) {
        const float* row = &logits[size_t(r) * K];
        hits[part] += std::max_element(row, row + num_classes) - row == c.label[r];
      }
  }

  // Gradient of the mean cross-entropy by logits: softmax minus one-hot, 0 outside training rows.
  void differentiate_loss(const Client& c) {
    std::fill_n(logit_gradient.begin(), size_t(c.rows) * K, 0.f);
    for (int r : c.train) {
      const float* row = &logits[size_t(r) * K];
      float most = *std::max_element(row, row + num_classes), exponential[K], sum = 0;
      for (int k = 0; k < num_classes; k++) sum += exponential[k] = std::exp(row[k] - most);
      for (int k = 0; k < num_classes; k++)
        logit_gradient[size_t(r) * K + k] =
            (exponential[k] / sum - (k == c.label[r])) / c.train.size();
    }
  }

  // Gradients of the second layer and of both biases; leaves that of x w1 in `product`.
  void differentiate_layers(const Client& c, const Weights& own, Weights& gradient) {
    multiply_logits(c.adjacency, c.rows, logit_gradient.data(), nullptr, projected.data());
    float w2_transposed[K * H];
    for (int j = 0; j < H; j++)
      for (int k = 0; k < K; k++) w2_transposed[k * H + j] = own.w2[j * K + k];
    for (Floats* g : {&gradient.b1, &gradient.w2, &gradient.b2}) std::fill(g->begin(), g->end(), 0.f);
    const float scale = dropout ? 2 : 1;
    for (int r = 0; r < c.rows; r++) {
      for (int k = 0; k < K; k++) gradient.b2[k] += logit_gradient[size_t(r) * K + k];
      const float* h = &hidden[size_t(r) * H];
      const float* d = &projected[size_t(r) * K];
      float* out = &hidden_gradient[size_t(r) * H];
      Vector row = load(d);
      for (int j = 0; j < H; j++) {
        float* g = &gradient.w2[j * K];
        store(g, load(g) + h[j] * row);
      }
      Row sum;
      for (int k = 0; k < num_classes; k++) sum.add(d[k], w2_transposed + k * H);
      sum.write(out);
      for (int j = 0; j < H; j++) {  // what ReLU or dropout made 0 has no gradient
        out[j] = h[j] > 0 ? scale * out[j] : 0;
        gradient.b1[j] += out[j];
      }
    }
    multiply(c.adjacency, c.rows, hidden_gradient.data(), nullptr, nullptr, product.data());
  }

  // Gradient of a row of w1 and its step at once, while the row is in cache.
  void step_first_weights(const Client& c, int epoch) {
    const Step s(epoch + 1);
    for (size_t f = 0; f < c.features.size(); f++) {
      float *own = &w[f * H], *m = &first[f * H], *v = &second[f * H], gradient[H];
      Row sum;
      sum.add(DECAY, own);
      for (int e = c.transposed.start[f]; e < c.transposed.start[f + 1]; e++)
        sum.add(c.transposed.value[e], &product[size_t(c.transposed.column[e]) * H]);
      sum.write(gradient);
      if (epoch == 0) {  // Adam starts anew: its moments are 0 and need not be read
        for (int j = 0; j < H; j++) {
          m[j] = (1 - BETA1) * gradient[j];
          v[j] = (1 - BETA2) * gradient[j] * gradient[j];
          own[j] -= s.rate * m[j] / (std::sqrt(v[j] * s.correction) + EPSILON);
        }
      } else {
        adam(own, m, v, gradient, H, s);
      }
    }
  }

  void train_unused_rows() {
    unused = server.w1;
    std::fill(unused_moments.first.begin(), unused_moments.first.end(), 0.f);
    std::fill(unused_moments.second.begin(), unused_moments.second.end(), 0.f);
    for (int epoch = 0; epoch < epochs; epoch++) {
      const Step s(epoch + 1);
      float *m = unused_moments.first.data(), *v = unused_moments.second.data();
      for (size_t i = 0; i < unused.size(); i++) {
        float gradient = DECAY * unused[i];
        m[i] = BETA1 * m[i] + (1 - BETA1) * gradient;
        v[i] = BETA2 * v[i] + (1 - BETA2) * gradient * gradient;
        unused[i] -= s.rate * m[i] / (std::sqrt(v[i] * s.correction) + EPSILON);
      }
    }
  }

  void train(const Client& c, Weights& own) {
    for (size_t f = 0; f < c.features.size(); f++)
      std::memcpy(&w[f * H], &server.w1[size_t(c.features[f]) * H], H * sizeof(float));
    own = {{}, server.b1, server.w2, server.b2};
    Weights gradient{{}, Floats(H), Floats(H * K), Floats(K)};
    Moments b1(H), w2(H * K), b2(K);
    for (int epoch = 0; epoch < epochs; epoch++) {
      predict(c, w.data(), nullptr, own, true);
      differentiate_loss(c);
      differentiate_layers(c, own, gradient);
      step_first_weights(c, epoch);
      const Step s(epoch + 1);
      adam(own.b1, b1, gradient.b1, s);
      adam(own.w2, w2, gradient.w2, s);
      adam(own.b2, b2, gradient.b2, s);
    }
  }

  void add_to_mean(const Client& c, const Weights& own, float factor) {
    for (size_t f = 0; f < c.features.size(); f++) {
      float* out = &mean.w1[size_t(c.features[f]) * H];
      for (int j = 0; j < H; j++) out[j] += factor * w[f * H + j];
      share[c.features[f]] += factor;
    }
    for (int j = 0; j < H; j++) mean.b1[j] += factor * own.b1[j];
    for (int i = 0; i < H * K; i++) mean.w2[i] += factor * own.w2[i];
    for (int k = 0; k < K; k++) mean.b2[k] += factor * own.b2[k];
  }

  void round() {
    for (Floats* part : {&mean.w1, &mean.b1, &mean.w2, &mean.b2, &share})
      std::fill(part->begin(), part->end(), 0.f);
    std::fill_n(own_hits, 2, 0);
    std::fill_n(server_hits, 2, 0);
    size_t total = 0;
    for (const Client& c : clients) total += c.train.size();
    train_unused_rows();
    Weights own;
    for (const Client& c : clients) {
      if (c.train.empty()) continue;
      train(c, own);
      predict(c, w.data(), nullptr, own, false);
      count_hits(c, own_hits);
      add_to_mean(c, own, float(c.train.size()) / total);
    }
    for (int f = 0; f < num_features; f++)
      for (int j = 0; j < H; j++)
        mean.w1[size_t(f) * H + j] += (1 - share[f]) * unused[size_t(f) * H + j];
    std::swap(server, mean);
    for (const Client& c : clients) {
      predict(c, server.w1.data(), c.features.data(), server, false);
      count_hits(c, server_hits);
    }
  }
};

Floats pad(const Floats& w2, int classes) {
  Floats padded(H * K);
  for (int j = 0; j < H; j++) std::copy_n(&w2[j * classes], classes, &padded[j * K]);
  return padded;
}

Federation read_input(FILE* file, int epochs, bool dropout) {
  Ints head = read<int>(file, 3);
  const int features = head[1], classes = head[2];
  const size_t size = size_t(features) * H;
  Federation fed;
  fed.epochs = epochs;
  fed.dropout = dropout;
  fed.num_features = features;
  fed.num_classes = classes;
  fed.unused_moments = Moments(size);
  fed.share.resize(features);
  fed.server.w1 = read<float>(file, size);
  fed.server.b1 = read<float>(file, H);
  fed.server.w2 = pad(read<float>(file, size_t(H) * classes), classes);
  fed.server.b2 = read<float>(file, classes);
  fed.server.b2.resize(K);
  fed.mean = fed.server;
  size_t most_rows = 0, most_features = 0;
  for (int i = 0; i < head[0]; i++) {
    Client c;
    Ints sizes = read<int>(file, 5);  // rows, features, training, validation, test rows
    c.rows = sizes[0];
    c.features = read<int>(file, sizes[1]);
    c.x = read_sparse(file, c.rows);
    c.adjacency = read_sparse(file, c.rows);
    c.label = read<int>(file, c.rows);
    c.train = read<int>(file, sizes[2]);
    c.val = read<int>(file, sizes[3]);
    c.test = read<int>(file, sizes[4]);
    c.transposed = transpose(c.x, c.rows, sizes[1]);
    most_rows = std::max(most_rows, size_t(c.rows));
    most_features = std::max(most_features, c.features.size());
    fed.judged[0] += c.val.size();
    fed.judged[1] += c.test.size();
    fed.clients.push_back(c);
  }
  for (Floats* part : {&fed.w, &fed.first, &fed.second}) part->resize(most_features * H);
  for (Floats* part : {&fed.product, &fed.hidden, &fed.hidden_gradient}) part->resize(most_rows * H);
  for (Floats* part : {&fed.projected, &fed.logits, &fed.logit_gradient})
    part->resize(most_rows * K);
  return fed;
}

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(int count, char** words) {
  if (count != 4) return 1;
  FILE* file = std::fopen(words[1], "rb");
  if (!file) return 2;
  Federation fed = read_input(file, std::atoi(words[2]), std::atof(words[3]) > 0);
  std::fclose(file);
  char command[16], argument[4096];
  while (std::scanf("%15s %4095s", command, argument) == 2) {
    if (std::string(command) == "rounds") {
      double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
      for (int i = 0; i < std::atoi(argument); i++) fed.round();
      std::printf("%.9f %.9f\n", seconds(CLOCK_MONOTONIC) - wall,
                  seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    } else {
      FILE* out = std::fopen(argument, "wb");
      if (!out) return 2;
      std::fwrite(fed.server.w1.data(), 4, fed.server.w1.size(), out);
      std::fwrite(fed.server.b1.data(), 4, H, out);
      for (int j = 0; j < H; j++) std::fwrite(&fed.server.w2[j * K], 4, fed.num_classes, out);
      std::fwrite(fed.server.b2.data(), 4, fed.num_classes, out);
      std::fclose(out);
      std::printf("%.6f %.6f\n", fed.own_hits[1] / double(fed.judged[1]),
                  fed.server_hits[1] / double(fed.judged[1]));
    }
    std::fflush(stdout);
  }
}
