"""How things are computed: one operation a file, each with its record, OP, and its reference."""

from bytefloor.ops import (
    add,
    attention,
    attention_coded,
    cache_write,
    code_pages,
    embed,
    gather_rows,
    glu,
    linear,
    rms_norm,
    rope,
    rotate,
    round_to,
    scale,
    select,
    soft_cap,
    view,
)
from bytefloor.ops.op import Op

OPS: dict[str, Op] = {
    module.OP.name: module.OP
    for module in (
        add,
        attention,
        attention_coded,
        cache_write,
        code_pages,
        embed,
        gather_rows,
        glu,
        linear,
        rms_norm,
        rope,
        rotate,
        round_to,
        scale,
        select,
        soft_cap,
        view,
    )
}
