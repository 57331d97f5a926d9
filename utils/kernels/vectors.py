"""Vectors of 16 numbers as values of numba code, and the few operations on them that Python has no word for.

Each operation is a numba intrinsic: a function that writes LLVM instructions where it is called. Addresses are plain
64-bit integers. All else in the kernels is Python that numba compiles. Reductions always run over 16 lanes in one
order, on every processor, so results do not depend on it. Imports numba: whoever imports this wants to compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, from_dtype, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from utils.kernels.instruction_sets import INSTRUCTION_SETS, instruction_set

WIDTH = 16
SET = instruction_set() or INSTRUCTION_SETS[-1]
LANES = SET.lanes

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


F, I = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)  # noqa: E741


class Vector(types.Type):
    """16 numbers in registers."""

    def __init__(self, name: str, llvm: ir.Type) -> None:
        self.llvm = llvm
        super().__init__(name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


REALS, WHOLES = Vector("16 reals", F), Vector("16 wholes", I)
compiled = njit(error_model="numpy")


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated `build(builder, *values) → value` a function of numba code with this signature."""

    def make(build: Callable[..., Any]) -> Any:
        def typed(context: Any, *_given: Any) -> Any:
            def generate(target: Any, builder: Any, _signature: Any, values: Any) -> Any:
                value = build(builder, *values)
                return target.get_dummy_value() if result is types.void else value

            return result(*arguments), generate

        names = ["context", *(f"a{place}" for place in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = typed.__qualname__ = build.__name__
        return intrinsic(typed)

    return make


Body = Callable[..., None]  # (builder, 64-bit arguments): writes a function without a result


def one_of(name: str, bodies: list[Body], arguments: int) -> Any:
    """(n, arguments…): runs the n-th of these functions, each of so many 64-bit integers, and stays one."""

    def build(builder: Any, chosen: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * arguments)
        after = builder.append_basic_block()
        choice = builder.switch(chosen, after)
        for place, body in enumerate(bodies):
            function = ir.Function(builder.module, kind, f"{name}.{place}.{builder.module.name}")
            function.linkage = "internal"
            function.attributes.add("noinline")
            inside = ir.IRBuilder(function.append_basic_block())
            body(inside, *function.args)
            inside.ret_void()
            choice.add_case(ir.Constant(I64, place), block := builder.append_basic_block())
            builder.position_at_end(block)
            builder.call(function, values)
            builder.branch(after)
        builder.position_at_end(after)

    return operation(types.void, *[int64] * (1 + arguments))(build)


# -- what LLVM has instructions for -----------------------------------------------------------------


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """A call of one of LLVM's own functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def pointer(builder: Any, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    """`address` + offset as a pointer to `kind`."""
    place = builder.add(address, ir.Constant(I64, offset)) if offset else address
    return builder.inttoptr(place, kind.as_pointer())


def read(builder: Any, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    return builder.load(pointer(builder, address, kind, offset), align=1)


def write(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    builder.store(value, pointer(builder, address, value.type, offset), align=1)


def spread(builder: Any, value: Any, width: int = WIDTH) -> Any:
    """A vector of `width` times the value."""
    kind = ir.VectorType(value.type, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, width), [0] * width))


def times_plus(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def moved(builder: Any, address: Any, count: Any, size: int) -> Any:
    """address + count · size."""
    return builder.add(address, builder.mul(count, number(size)))


def loop(builder: Any, count: Any, values: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """values = step(index, values) for each index below `count`, which is at least one."""
    before, inside = builder.block, builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    held = [builder.phi(value.type) for value in values]
    new = step(index, held)
    following = builder.add(index, number(1))
    for phi, first, then in zip([index, *held], [number(0), *values], [following, *new], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(then, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, count), inside, after := builder.append_basic_block())
    builder.position_at_end(after)
    return new


def fetch(builder: Any, address: Any) -> None:
    """Have the cache line at an address read: it is needed soon, and once. A pass reads more weights than caches hold;
    they should not push out what the rest of a round works on."""
    place = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *(ir.Constant(I32, value) for value in (0, 0, 1)))


# -- memory ---------------------------------------------------------------------------------------------


def reading(result: types.Type, kind: ir.Type, widen: str = "", to: ir.Type | None = None) -> Any:
    """address → what lies there, widened by the instruction of that name."""

    def build(builder: Any, address: Any) -> Any:
        value = read(builder, address, kind)
        return getattr(builder, widen)(value, to) if widen else value

    return operation(result, int64)(build)


get64 = reading(int64, I64)
get8 = reading(int64, I8, "sext", I64)
get_float = reading(float32, F32)
get_half = reading(float32, F16, "fpext", F32)
load = reading(REALS, F)


@operation(types.void, int64, float32)
def put_float(builder: Any, address: Any, value: Any) -> None:
    write(builder, value, address)


@operation(types.void, int64, float32)
def put_half(builder: Any, address: Any, value: Any) -> None:
    write(builder, builder.fptrunc(value, F16), address)


@operation(types.void, int64, int64)
def copy_half(builder: Any, source: Any, address: Any) -> None:
    """Two bytes."""
    write(builder, read(builder, source, ir.IntType(16)), address)


@operation(types.void, int64, REALS)
def store(builder: Any, address: Any, value: Any) -> None:
    write(builder, value, address)


@operation(types.void, int64, REALS)
def store_half(builder: Any, address: Any, value: Any) -> None:
    write(builder, builder.fptrunc(value, ir.VectorType(F16, WIDTH)), address)


def record_at(layout: np.dtype) -> Any:
    """The record of this layout that lies at an address, for numba code: its fields are attributes."""
    kind = from_dtype(layout)

    def build(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, ir.ArrayType(I8, layout.itemsize).as_pointer())

    return operation(kind, int64)(build)


# -- arithmetic ------------------------------------------------------------------------------------------


@operation(REALS, float32)
def splat(builder: Any, value: Any) -> Any:
    return spread(builder, value)


@operation(REALS, REALS, REALS)
def add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@operation(REALS, REALS, REALS)
def sub(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@operation(REALS, REALS, REALS)
def mul(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@operation(REALS, REALS, REALS)
def div(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@operation(REALS, REALS, REALS, REALS)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return times_plus(builder, a, b, c)


@operation(REALS, REALS)
def nearest(builder: Any, a: Any) -> Any:
    """Rounded to whole numbers, ties to even."""
    return call(builder, "llvm.rint.v16f32", F, a)


@operation(REALS, REALS, REALS)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each two; NaN of `a` stays."""
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


@operation(REALS, REALS, REALS)
def smaller(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of each two; NaN of `a` stays."""
    return builder.select(builder.fcmp_ordered(">", a, b), b, a)


@operation(WHOLES, REALS)
def whole(builder: Any, a: Any) -> Any:
    """The nearest integers, ties to even; of what has none, the least. LLVM's own conversions leave that open, or
    take the numbers one by one."""
    if LANES == WIDTH:
        keep = [ir.Constant(I, None), ir.Constant(I16, -1), ir.Constant(I32, 4)]  # 4: as the processor is set to round
        return call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", I, a, *keep)
    narrow, halves = ir.VectorType(I32, LANES), []
    for first in (0, LANES):
        places = ir.Constant(narrow, [first + lane for lane in range(LANES)])
        half = builder.shuffle_vector(a, a, places)
        halves.append(call(builder, "llvm.x86.avx.cvt.ps2dq.256", narrow, half))
    return builder.shuffle_vector(*halves, ir.Constant(I, list(range(WIDTH))))


@operation(REALS, WHOLES)
def power_of_two(builder: Any, exponent: Any) -> Any:
    """2 to the power, for exponents of -126 to 127."""
    biased = builder.add(exponent, ir.Constant(I, [127] * WIDTH))
    return builder.bitcast(builder.shl(biased, ir.Constant(I, [23] * WIDTH)), F)


@operation(float32, REALS)
def total(builder: Any, a: Any) -> Any:
    """The sum, halves added to halves: the same order on every processor."""
    value, width = a, WIDTH
    while width > 1:
        width //= 2
        low, high = ([ir.Constant(I32, place + first) for place in range(width)] for first in (0, width))
        halves = [
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, width), places))
            for places in (low, high)
        ]
        value = builder.fadd(*halves)
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(float32, REALS)
def largest(builder: Any, a: Any) -> Any:
    """The largest; NaN if one is."""
    return call(builder, "llvm.vector.reduce.fmaximum.v16f32", F32, a)


@operation(int64, WHOLES, WHOLES)
def count(builder: Any, a: Any, b: Any) -> Any:
    """The sum of both vectors' integers."""
    return builder.sext(call(builder, "llvm.vector.reduce.add.v16i32", I32, builder.add(a, b)), I64)


@operation(int64, REALS, REALS)
def greatest_bits(builder: Any, a: Any, b: Any) -> Any:
    """The bits of the largest magnitude in both vectors. Those of infinity and NaN are larger than any number's."""
    mask = ir.Constant(I, [0x7FFFFFFF] * WIDTH)
    bits = [builder.and_(builder.bitcast(value, I), mask) for value in (a, b)]
    most = builder.select(builder.icmp_unsigned(">", *bits), *bits)
    return builder.zext(call(builder, "llvm.vector.reduce.umax.v16i32", I32, most), I64)


@operation(float32, int64)
def float_of_bits(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, I32), F32)


@compiled
def exponential(x: Any) -> Any:
    """e to the power of 16 values, within two units of the last place, for -87 to 88; clamped beyond; NaN stays."""
    x = smaller(larger(x, splat(float32(-87.0))), splat(float32(88.0)))
    n = nearest(mul(x, splat(float32(1.4426950408889634))))
    r = fma(n, splat(float32(-0.693359375)), x)
    r = fma(n, splat(float32(2.12194440e-4)), r)
    p = fma(splat(float32(1.9875691500e-4)), r, splat(float32(1.3981999507e-3)))
    p = fma(p, r, splat(float32(8.3334519073e-3)))
    p = fma(p, r, splat(float32(4.1665795894e-2)))
    p = fma(p, r, splat(float32(1.6666665459e-1)))
    p = fma(p, r, splat(float32(5.0000001201e-1)))
    p = add(fma(p, mul(r, r), r), splat(float32(1.0)))
    return mul(p, power_of_two(whole(n)))


# -- threads --------------------------------------------------------------------------------------------

PATIENCE = 5000  # pauses before a sleep: some 50 µs
NAP = 20  # µs


@operation(int64, int64)
def asked(builder: Any, function: Any) -> Any:
    """What the C function of no arguments at this address answers."""
    kind = ir.FunctionType(I32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), I64)


def calling(arguments: int) -> Any:
    """(function, arguments…): calls the entry (utils/kernels/compiler.py) at this address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * arguments)

    def build(builder: Any, function: Any, *values: Any) -> None:
        builder.call(builder.inttoptr(function, kind.as_pointer()), values)

    return operation(types.void, *[int64] * (1 + arguments))(build)


@operation(types.void, int64, int64)
def nap(builder: Any, function: Any, microseconds: Any) -> None:
    """Calls the C function of one unsigned at this address."""
    kind = ir.FunctionType(I32, [I32])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.trunc(microseconds, I32)])


@operation(types.void, int64)
def arrive(builder: Any, address: Any) -> None:
    """Adds one to the counter."""
    builder.atomic_rmw("add", pointer(builder, address, I64), ir.Constant(I64, 1), "acq_rel")


@operation(int64, int64)
def arrived(builder: Any, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, I64), "acquire", 8)


@operation(types.void)
def pause(builder: Any) -> None:
    call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@compiled
def meet(counter: int, team: int, turn: int, sleep: int) -> int:
    """Wait until all threads of the team are here for the `turn`-th time; the next turn.

    A wait far longer than any stage means that a thread was taken off its core: sleeping frees this core for it. Sleeps
    are counted behind the counter, in a cache line of their own.
    """
    all_here = (turn + 1) * team
    arrive(counter)
    looks = 0
    while arrived(counter) < all_here:
        pause()
        looks += 1
        if looks > PATIENCE:
            nap(sleep, NAP)
            arrive(counter + 64)
    return turn + 1


@compiled
def share(count: int, thread: int, team: int) -> tuple[int, int]:
    """Which of `count` units this thread of the team does: from, to."""
    return count * thread // team, count * (thread + 1) // team
