"""Names that a vector filter may use, and what to write for names from other libraries."""

from megatronapp_common.filters.syntax import Function, Reduction

DATA = "data"
FUNCTIONS = {
    "abs": Function.ABS,
    "sqrt": Function.SQRT,
    "square": Function.SQUARE,
    "float": Function.FLOAT,
}
REDUCTIONS = {
    "mean": Reduction.MEAN,
    "sum": Reduction.SUM,
    "max": Reduction.MAX,
    "min": Reduction.MIN,
    "amax": Reduction.MAX,
    "amin": Reduction.MIN,
}
WHERE = "where"
POWER = "pow"
CALLABLE = [*FUNCTIONS, *REDUCTIONS, WHERE, POWER]
PREFIXES = {"torch"}
AXES = {"dim", "axis"}
KEEP = {"keepdim", "keepdims"}
TRUTHS = {"True": True, "False": False}
VALUES = "values"
"""Attribute of torch's max and min along an axis."""

_NO_NEED = "leave it out: data is a plain vector here"
_NO_LENGTH = "mean divides by the length by itself; write mean instead of a sum over it"
_NO_PROGRAM = "one formula of data can be written, and no program"
_NO_PREFIX = "write the function alone, as in sqrt(data), or torch.sqrt(data)"
INSTEAD = {
    "absmax": "write data.abs().max(dim=-1)",
    "rms": "write data.square().mean(dim=-1).sqrt()",
    "norm": "write data.square().sum(dim=-1).sqrt()",
    "std": "choose the reducer std, or write (data - data.mean()).square().mean().sqrt()",
    "var": "write (data - data.mean()).square().mean()",
    "histogram": "choose the reducer, as in histogram(32, -4, 4), alone",
    "median": "not available; mean, max and min are",
    "quantile": "not available; mean, max and min are",
    "argmax": "the index of the largest is not available; max is its value",
    "argmin": "the index of the smallest is not available; min is its value",
    "indices": "the index of the largest is not available; omit it",
    "relu": "write where(data > 0, data, 0)",
    "clamp": "write where(data < 0, 0, data) for min=0, where(data > 1, 1, data) for max=1",
    "clip": "write where(data < 0, 0, data) for min=0, where(data > 1, 1, data) for max=1",
    "sign": "write where(data > 0, 1, where(data < 0, -1, 0))",
    "maximum": "write where(a > b, a, b)",
    "minimum": "write where(a < b, a, b)",
    "exp": "not available; ** with a constant is, as in 2.71828 ** data",
    "log": "not available; results are shown unchanged",
    "softmax": "not available; probabilities have a separate panel",
    "and": "put one where into another: where(a > 0, where(b > 0, x, y), y)",
    "or": "put one where into another: where(a > 0, x, where(b > 0, x, y))",
    "not": "turn the comparison round: <= for >",
    "if": "write where(condition, x, y)",
    "else": "write where(condition, x, y)",
    "shape": _NO_LENGTH,
    "size": _NO_LENGTH,
    "numel": _NO_LENGTH,
    "len": _NO_LENGTH,
    "item": _NO_NEED,
    "cpu": _NO_NEED,
    "detach": _NO_NEED,
    "to": _NO_NEED,
    "view": _NO_NEED,
    "reshape": _NO_NEED,
    "flatten": _NO_NEED,
    "squeeze": _NO_NEED,
    "unsqueeze": _NO_NEED,
    "transpose": _NO_NEED,
    "lambda": _NO_PROGRAM,
    "import": _NO_PROGRAM,
    "for": _NO_PROGRAM,
    "def": _NO_PROGRAM,
    "eval": _NO_PROGRAM,
    "exec": _NO_PROGRAM,
    "print": _NO_PROGRAM,
    "np": _NO_PREFIX,
    "numpy": _NO_PREFIX,
    "math": _NO_PREFIX,
    "F": _NO_PREFIX,
    "x": "the vector is called data",
    "X": "the vector is called data",
    "tensor": "the vector is called data",
    "values": "it follows max and min only; omit it",
    "True": "write a comparison, such as data > 0",
    "False": "write a comparison, such as data > 0",
}
INSTEAD_OF_SIGNS = {
    "//": "divide with /",
    "%": "there is no remainder",
    "@": "there is no matrix here; multiply elements with *",
    "^": "write ** for a power",
    "&": "put one where into another: where(a > 0, where(b > 0, x, y), y)",
    "|": "put one where into another: where(a > 0, x, where(b > 0, x, y))",
    "~": "turn the comparison round: <= for >",
    "!": "write != for 'is not'",
    ";": "write one formula",
    "'": "there are no texts here; write numbers and data",
    '"': "there are no texts here; write numbers and data",
    "\u2212": "write - for minus",
    "\u00d7": "write * for times",
    "\u00b2": "write ** 2",
    "\u2264": "write <=",
    "\u2265": "write >=",
}
"""Hints for signs that have no meaning in a filter."""
