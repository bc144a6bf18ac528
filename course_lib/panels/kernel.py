"""A matrix product by tiles on one GPU (lesson 13a): what takes longest, and how many multiprocessors have a tile."""

from course_lib.hardware import AMPERE, BLACKWELL, HOPPER, gpu, peak_flops
from course_lib.panels.controls import controls
from course_lib.panels.record import Panel, Shown
from course_lib.panels.svg import bars
from course_lib.timing.kernel import busy_share, product_bytes

COMPARED = {"a100-80": AMPERE, "h100": HOPPER, "b200": BLACKWELL}
_ITEMSIZES = {"bf16": 2, "fp8": 1}


def _draw(rows: int, d_model: int, tile_m: int, tile_n: int, precision: str) -> Shown:
    """Seconds of [rows, d] by [d, d] on each GPU: computing; moving each matrix once, or what all tiles ask for."""
    itemsize, flops = _ITEMSIZES[precision], 2 * rows * d_model**2
    asked = sum(product_bytes(rows, d_model, d_model, tile_m, tile_n, itemsize))
    once = itemsize * (2 * rows * d_model + d_model**2)
    shown, said = {}, []
    for key, of in COMPARED.items():
        device = gpu(key)
        if precision == "fp8" and device.fp8_flops is None:
            said.append(f"{device.name} has no FP8 units.")
            continue
        compute_s = flops / peak_flops(device, precision)
        once_s, asked_s = once / device.memory_bytes_per_s, asked / device.memory_bytes_per_s
        share = busy_share(rows, d_model, tile_m, tile_n, of)
        shown[device.name] = {"computing": compute_s}
        shown[f"its memory, {key}"] = {"moving bytes": once_s, "read again": max(asked_s - once_s, 0.0)}
        bound = "computing" if compute_s > once_s else "memory"
        bound += ", or by memory if no cache answered" if asked_s > compute_s > once_s else ""
        said.append(f"{device.name}: bound by {bound}; its SMs have a tile {share:.0%} of the time.")
    said.append(
        f"Tiles ask for {asked / once:.1f} times the bytes of the matrices; caches must answer what is read again."
    )
    title = f"[{rows:,}, {d_model:,}] x [{d_model:,}, {d_model:,}], modelled"
    return [bars(title, shown, "seconds")], " ".join(said)


TILES = Panel("A product by tiles", controls(rows=4096, d_model=4096, tile_m=128, tile_n=128, precision="bf16"), _draw)
