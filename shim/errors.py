"""Every error that opshim raises on purpose. Each message is one sentence that names what was wrong."""


class OpshimError(Exception):
    """Base of all errors raised by opshim."""


class OpArgumentError(OpshimError, ValueError):
    """A call's argument breaks the op's contract. Raised before any provider runs; for a scalar of the wrong type, after
    a provider has failed on it."""

    def __init__(self, op: str, argument: str, expected: str, got: str):
        super().__init__(f"{op}: argument '{argument}': expected {expected}, got {got}")
        self.op, self.argument, self.expected, self.got = op, argument, expected, got


class RegistrationError(OpshimError):
    """An op or an implementation was declared wrongly; the message ends with file and line."""


class UnknownNameError(OpshimError, KeyError):
    """An op, provider, policy or level that does not exist; the message lists those that do."""

    def __init__(self, what: str, name: str, known, note: str = ""):
        self.what, self.name, self.known = what, name, sorted(known)
        words = f"unknown {what} '{name}'; known: {', '.join(self.known) or 'none'}"
        super().__init__("; ".join([words, *[note] * bool(note)]))

    def __str__(self) -> str:  # KeyError would quote the message
        return self.args[0]


class OpUnavailableError(OpshimError, RuntimeError):
    """No candidate of the chain may serve the op under the policy; the message holds the chain table."""


class OpExecutionError(OpshimError, RuntimeError):
    """A provider raised under the strict policy; the message describes every argument of the call."""


class BuildError(OpshimError, RuntimeError):
    """A native library could not be built here; the message says why, in the compiler's words where it failed.
    `lasting`: the same sources will fail again, so trying them again is a waste."""

    def __init__(self, message: str, lasting: bool = False):
        super().__init__(message)
        self.lasting = lasting


# what names a device's error: torch and others, torch of the driver's own calls, Triton
_NAMED = ("CUDA error", "CUDA driver error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")
# errors after which every later call of the process fails too
_STICKY = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "operation not supported on global/shared address space",
)


def is_sticky(error: BaseException) -> bool:
    """Whether the error leaves the device unusable for the rest of the process. The line that names the error tells:
    below it torch speaks of device-side assertions whatever the error is."""
    named = [line for line in str(error).splitlines() if any(words in line for words in _NAMED)]
    return any(words in line for line in named for words in _STICKY)


def describe(op, args) -> str:
    """Every argument of a call in one line each: shape, dtype, strides and device of tensors, the value of others."""
    lines = []
    for name, value in zip(op.signature.parameters, args):
        if hasattr(value, "stride"):
            value = f"{list(value.shape)} {str(value.dtype)[6:]} strides {list(value.stride())} {value.device}"
        lines.append(f"  {name}: {value}")
    return "\n".join(lines)
