"""Recurrent cores for [T, B, ...]: S5 (Smith 2023, 2208.04933), LSTM, GRU, none. See make_core.

A core maps carry, x [T, B, I], is_first [T, B] to carry, y [T, B, H]; to act, T = 1. Its state is
dropped where is_first. core.initial_carry(B) is the state at the start of an episode. For S5:

    x'(t) = Lambda x(t) + B u(t),    y(t) = C x(t) + D u(t)        a diagonal, complex state space
    x_k   = Lambda_bar x_{k-1} + B_bar u_k                         at steps of learned length Delta
    y_k   = 2 Re(C x_k) + D u_k                                    one state of each conjugate pair
    u    <- LayerNorm(u + g * sigmoid(W g + b)),  g = gelu(y)      a layer; S5 stacks n_layers

Learning takes all T steps at once with a parallel scan, acting (T = 1) one step of the recurrence.
Arrays with axes T or N hold complex numbers as pairs of reals, [2, P] = (re, im): XLA compiles
complex scans about seven times slower on a CPU.
Shapes: T steps, N sequences (B in the scripts), H = d_model features, P = ssm_size / 2 states.
"""

from functools import lru_cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

DELTA = 0.001, 0.1  # initial steps: log-uniform between these
CONJ = np.float32([[1], [-1]])  # [2, 1]  (re, im) * CONJ is the complex conjugate


def on_gpu():
    """Whether a GPU runs this. Its time depends on the number of kernels, a CPU's on arithmetic
    and memory: scans, projections and sums over time have a form for each, with one result."""
    return jax.default_backend() != "cpu"


def pair(z):
    """Complex z [...] as a pair of reals (re, im): [2, ...]."""
    return jnp.stack([z.real, z.imag]).astype(jnp.float32)


def times(a, x):
    """The complex product a x of a [2, P] and x [..., 2, P]: [..., 2, P]."""
    return a[0] * x - a[1] * CONJ * jnp.flip(x, -2)


def parallel_scan(Lambda_bar, keep, x, Bu, reverse=False):
    """x_k = keep_k Lambda_bar x_{k-1} + Bu_k for k = 1..T from x_0 = x [N, 2, P]: [T, N, 2, P].

    A parallel scan (sec. 2.2, app. H) for a constant Lambda_bar. On a CPU in 3 sqrt(T) steps: T/L
    chunks of L steps from zero, all at once; the state before each chunk; all chunks from there.
    On a GPU in log4(T) kernels: from sums over the last s steps to sums over the last 4 s."""
    T = len(Bu)
    if T == 1:  # acting
        return keep * times(Lambda_bar, x) + Bu
    if on_gpu():
        if reverse:
            return parallel_scan(Lambda_bar, keep[::-1], x, Bu[::-1])[::-1]
        earlier = lambda x, n: jnp.concatenate([jnp.zeros_like(x[:n]), x[: max(T - n, 0)]])
        xs, s = jnp.concatenate([Bu[:1] + keep[:1] * times(Lambda_bar, x), Bu[1:]]), 1
        while s < T:
            sums, kept, power = xs, keep, Lambda_bar               # kept: no reset in these steps
            for n in (s, 2 * s, 3 * s):
                sums += kept * times(power, earlier(xs, n))
                kept, power = kept * earlier(keep, n), times(Lambda_bar, power)
            s, xs, keep, Lambda_bar = 4 * s, sums, kept, power
        return xs
    L = next(n for n in range(int(T**0.5), 0, -1) if T % n == 0)
    keep = keep.reshape(T // L, L, *keep.shape[1:])                # [T/L, L, N, 1, 1]
    Bu = Bu.reshape(T // L, L, *Bu.shape[1:])                      # [T/L, L, N, 2, P]
    at = lambda i: L - 1 - i if reverse else i

    def step_from_zero(i, ends):
        x, power = ends                                            # [T/L, N, 2, P], Lambda_bar^i
        x = keep[:, at(i)] * times(Lambda_bar, x) + Bu[:, at(i)]
        return x, times(Lambda_bar, power)

    def next_chunk(x, chunk):
        keep, end = chunk                                          # [N, 1, 1], [N, 2, P]
        return keep * times(power, x) + end, x

    def step(i, states):
        x, xs = states                                             # xs: Bu, turned into x
        x = keep[:, at(i)] * times(Lambda_bar, x) + xs[:, at(i)]
        return x, jax.lax.dynamic_update_index_in_dim(xs, x, at(i), 1)

    one = jnp.zeros_like(Lambda_bar).at[0].set(1.0)
    ends, power = jax.lax.fori_loop(0, L, step_from_zero, (jnp.zeros_like(Bu[:, 0]), one))
    _, x = jax.lax.scan(next_chunk, x, (keep.prod(1), ends), reverse=reverse)  # before each chunk
    _, xs = jax.lax.fori_loop(0, L, step, (x, Bu))
    return xs.reshape(T, *xs.shape[2:])


@jax.custom_vjp
def recurrence(Lambda_bar, keep, x_0, Bu):
    """parallel_scan; its gradient stores x only. Lambda_bar [2, P], keep [T, N, 1, 1], Bu as x."""
    return parallel_scan(Lambda_bar, keep, x_0, Bu)


def recurrence_forward(Lambda_bar, keep, x_0, Bu):
    x = parallel_scan(Lambda_bar, keep, x_0, Bu)
    return x, (Lambda_bar, keep, x_0, x)


def recurrence_backward(residuals, d_x):
    """The adjoint is the same recurrence, backwards in time and with Lambda_bar's conjugate."""
    Lambda_bar, keep, x_0, x = residuals
    Lambda_conj, keep_next = Lambda_bar * CONJ, jnp.concatenate([keep[1:], keep[:1]])
    d_Bu = parallel_scan(Lambda_conj, keep_next, jnp.zeros_like(x_0), d_x, reverse=True)
    x_prev, d = jnp.concatenate([x_0[None], x[:-1]]), keep * d_Bu  # [T, N, 2, P]
    d_re = (d * x_prev).sum((0, 1, 2))                             # [P]
    d_im = (d * -CONJ * jnp.flip(x_prev, -2)).sum((0, 1, 2))       # [P]
    return jnp.stack([d_re, d_im]), None, times(Lambda_conj, d[0]), d_Bu


recurrence.defvjp(recurrence_forward, recurrence_backward)


@lru_cache
def hippo_legs(n):
    """Half of the eigenpairs of HiPPO-LegS's normal part (app. B.1), n even: [n/2], [n, n/2]."""
    p = np.sqrt(np.arange(n) + 0.5)                                # [n]
    S = np.triu(np.outer(p, p), 1) - np.tril(np.outer(p, p), -1)   # [n, n]  A + p p^T = S - I/2
    im, V = np.linalg.eigh(-1j * S)                                # S is skew-symmetric, V unitary
    return -0.5 + 1j * im[n // 2 :], V[:, n // 2 :]                # im > 0: one of each pair


class LayerNorm(nn.Module):
    """Layer normalisation (1607.06450); flax's takes three times as long to compile on a CPU."""

    @nn.compact
    def __call__(self, u):
        scale = self.param("scale", nn.initializers.ones, u.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, u.shape[-1:])
        u = u - u.mean(-1, keepdims=True)
        return u * jax.lax.rsqrt((u * u).mean(-1, keepdims=True) + 1e-6) * scale + bias


class S5Layer(nn.Module):
    """State space, half-GLU, skip, norm (sec. 3): x [N, 2, P], u [T, N, H], keep -> x_T, u."""

    d_model: int
    ssm_size: int
    blocks: int
    norm: str

    @nn.compact
    def __call__(self, x, u, keep):
        T, N, H = u.shape
        P = self.ssm_size // 2
        Lambda_block, V_block = hippo_legs(self.ssm_size // self.blocks)
        Lambda_0 = np.tile(Lambda_block, self.blocks)              # [P]
        V = np.kron(np.eye(self.blocks), V_block)                  # [2P, P]  V^-1 = V^H
        # C's fan-in is 2P: up to sqrt(2) the S5 authors' default; minimax has their other, 2P H.
        lecun = nn.initializers.lecun_normal(1, 0)
        init_log_Delta = lambda rng: jax.random.uniform(rng, (P,), jnp.float32, *np.log(DELTA))
        Lambda_re = self.param("Lambda_re", lambda _: pair(Lambda_0)[0])   # [P]
        Lambda_im = self.param("Lambda_im", lambda _: pair(Lambda_0)[1])   # [P]
        B = self.param("B", lambda rng: pair(V.conj().T @ lecun(rng, (2 * P, H))))  # [2, P, H]
        C = self.param("C", lambda rng: pair(lecun(rng, (H, 2 * P)) @ V))           # [2, H, P]
        D = self.param("D", nn.initializers.normal(1.0), (H,))     # [H]
        log_Delta = self.param("log_Delta", init_log_Delta)        # [P]

        # zero-order hold (eq. 6); expm1, as Lambda_bar - 1 cancels where Delta is small
        Lambda = jnp.minimum(Lambda_re, -1e-4) + 1j * Lambda_im    # [P]  Re < 0: stable
        Delta = jnp.exp(log_Delta)                                 # [P]
        Lambda_bar = jnp.exp(Lambda * Delta)                       # [P]
        scale = jnp.expm1(Lambda * Delta) / Lambda                 # [P]
        scale = jax.lax.optimization_barrier(scale)                # else computed for all P x H
        B_bar = scale[:, None] * (B[0] + 1j * B[1])                # [P, H]
        skip = u
        u = LayerNorm()(u) if self.norm == "before" else u
        Bu = (u @ pair(B_bar).reshape(2 * P, H).T).reshape(T, N, 2, P)
        x = recurrence(pair(Lambda_bar), keep, x, Bu)              # [T, N, 2, P]
        C = 2 * jnp.concatenate([C[0], -C[1]], 1)                  # [H, 2P]  2 Re(C x) of pairs x
        y = x.reshape(T, N, 2 * P) @ C.T + D * u                   # [T, N, H]
        g = nn.gelu(y)
        u = skip + g * nn.sigmoid(nn.Dense(H)(g))
        u = LayerNorm()(u) if self.norm == "after" else u
        return x[-1], u


class S5(nn.Module):
    """An encoder and S5 layers: carry, xs [T, N, ...], is_first [T, N] -> carry, ys [T, N, H]."""

    d_model: int = 256  # H
    ssm_size: int = 256  # 2P; conjugate symmetry leaves P complex states
    n_layers: int = 2
    blocks: int = 2  # HiPPO-LegS blocks on the diagonal of the initial state matrix
    norm: str = "after"  # LayerNorm's place in a layer: "after", "before", "none"

    def initial_carry(self, batch):
        """The state at the start of an episode, [N, 2, P] for each layer."""
        return (jnp.zeros((batch, 2, self.ssm_size // 2)),) * self.n_layers

    @nn.compact
    def __call__(self, carry, xs, is_first):
        keep = 1.0 - jnp.float32(is_first)[..., None, None]        # [T, N, 1, 1]  0: a new episode
        u = nn.Dense(self.d_model)(xs)                             # [T, N, H]
        last = []
        for x in carry:
            layer = S5Layer(self.d_model, self.ssm_size, self.blocks, self.norm)
            x, u = layer(x, u, keep)
            last.append(x)
        return tuple(last), u


# --- LSTM, GRU, none


def scan(step, carry, xs, reverse=False, unroll=8):
    """jax.lax.scan, on a GPU unrolled: fewer CUDA graphs; an LSTM's short steps compile fast."""
    return jax.lax.scan(step, carry, xs, reverse=reverse, unroll=unroll if on_gpu() else 1)


@jax.custom_vjp
def lstm(carry, x, is_first, w, b):
    """LSTM (Hochreiter 1997): x [T, B, I], w [4H, I + H], b [4H] -> carry, h [T, B, H]. Inputs may
    also be projected already: x [T, B, 4H], w [4H, H]. Each step computes the same as flax's
        carry, h[t] = nn.LSTMCell(H)(carry, x[t])        with carry zero where is_first[t].
    On a CPU w @ [x; h] with units first, [I + H, B], is twice as fast as the transposed product.
    The gradient, also the same, is written by hand: dw is one large product, not a sum over T."""
    return lstm_forward(carry, x, is_first, w, b)[0]


def lstm_forward(carry, x, is_first, w, b):
    def step(carry, inputs):
        x, keep = inputs
        c, h = carry[0] * keep, carry[1]  # [H, B]; keep: 0 where o_t opens an episode, else 1
        z = w @ h * keep + x.T if projected else w @ jnp.concatenate([x.T, h * keep])
        i, f, g, o = jnp.split(z + b[:, None], 4)
        i, f, g, o = nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)
        c_next = f * c + i * g
        h_next = o * jnp.tanh(c_next)
        saved = i, f, g, o, c
        return (c_next, h_next), (h_next.T, jnp.stack(saved) if on_gpu() else saved)

    projected, keep = w.shape[1] == carry[1].shape[1], 1.0 - is_first[:, None]
    (c, h), (hs, saved) = scan(step, (carry[0].T, carry[1].T), (x, keep), unroll=16)
    return ((c.T, h.T), hs), (x, carry[1], hs, saved, keep, w)


def lstm_backward(residuals, gradients):
    def step(d_carry, inputs):
        d_h, (i, f, g, o, c), keep = inputs
        d_h, tanh_c = d_carry[1] + d_h.T, jnp.tanh(f * c + i * g)
        d_c = d_carry[0] + d_h * o * (1 - tanh_c**2)
        d_gates = d_c * g, d_c * c, d_c * i, d_h * tanh_c
        slopes = i * (1 - i), f * (1 - f), 1 - g**2, o * (1 - o)
        d_z, d_c = jnp.concatenate([x * y for x, y in zip(d_gates, slopes)]), d_c * f
        d_x, d_h = jnp.split(w.T @ d_z, [w.shape[1] - len(c)])
        return (d_c * keep, d_h * keep), (d_z.T, d_z.T if projected else d_x.T)

    (x, h_0, hs, saved, keep, w), ((d_c, d_h), d_hs) = residuals, gradients
    projected, inputs = w.shape[1] == h_0.shape[1], (d_hs, saved, keep)
    (d_c, d_h), (d_z, d_x) = scan(step, (d_c.T, d_h.T), inputs, reverse=True, unroll=16)
    h = jnp.concatenate([h_0[None], hs[:-1]]) * keep.swapaxes(1, 2)  # h before each step
    xh = h if projected else jnp.concatenate([x, h], axis=-1)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # [T * B, ...]
    # the barrier keeps XLA from transposing the product, which would take longer
    d_w = jax.lax.optimization_barrier(flat(xh).T @ flat(d_z)).T
    return (d_c.T, d_h.T), d_x, None, d_w, d_z.sum((0, 1))


lstm.defvjp(lstm_forward, lstm_backward)


def gru(carry, x, is_first, w, b):
    """GRU (1406.1078): projected x [T, B, 3H], w [3H, H], b [3H] -> carry, h [T, B, H]."""

    def step(h, inputs):
        z, keep = inputs
        h = h * keep
        (zr, zu, zn), (hr, hu, hn) = jnp.split(z, 3, axis=-1), jnp.split(h @ w.T, 3, axis=-1)
        r, u = nn.sigmoid(zr + hr), nn.sigmoid(zu + hu)
        h = (1 - u) * jnp.tanh(zn + r * hn) + u * h
        return h, h

    return scan(step, carry, (x + b, 1.0 - is_first[..., None]))


class GatedCore(nn.Module):
    """LSTM, GRU or none (y = x): carry, x [T, B, I], is_first [T, B] -> carry, y [T, B, H]."""

    rnn: str
    size: int

    def initial_carry(self, batch):
        h = jnp.zeros((batch, self.size))
        return {"lstm": (h, h), "gru": h, "none": ()}[self.rnn]

    @nn.compact
    def __call__(self, carry, x, is_first):
        if self.rnn == "none":
            return carry, x
        core, gates = {"lstm": (lstm, 4), "gru": (gru, 3)}[self.rnn]
        project = self.rnn == "gru" or x.shape[-1] > gates * self.size  # a teacher's are wide
        if project:  # project all steps in one product; for the barrier see lstm_backward
            x = nn.Dense(gates * self.size, use_bias=False)(x)
            x = jax.lax.optimization_barrier(x)

        def kernel(rng):  # [gates * H, I + H]; the columns for h are orthogonal, gate by gate
            rng, *rngs = jax.random.split(rng, 1 + gates)
            w_h = jnp.vstack([orthogonal(1.0)(rng, (self.size, self.size)) for rng in rngs])
            lecun_normal = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
            w_x = [] if project else [lecun_normal(rng, (gates * self.size, x.shape[-1]))]
            return jnp.hstack([*w_x, w_h])

        bias = self.param("bias", nn.initializers.zeros, gates * self.size)
        w = self.param("kernel", kernel)
        if self.rnn == "lstm" and not project and len(x) > 1 and on_gpu():  # one product, too
            w_x, w = jnp.split(w, [x.shape[-1]], axis=1)
            x = x @ w_x.T
        return core(carry, x, is_first, w, bias)


def orthogonal(scale):
    """flax's initialiser, for one seed after the other: on a CPU, a QR decomposition that is
    batched over seeds can block jaxlib's threads for ever."""
    draw, in_turn = nn.initializers.orthogonal(scale), jax.custom_batching.sequential_vmap
    return lambda rng, shape, dtype=None: in_turn(partial(draw, shape=shape))(rng)


def make_core(rnn, size, s5_layers, s5_norm):
    """The core `rnn`: lstm, gru, s5 or none, of `size` units."""
    if rnn == "s5":
        return S5(d_model=size, ssm_size=max(size // 4 * 4, 4), n_layers=s5_layers, norm=s5_norm)
    return GatedCore(rnn, size)
