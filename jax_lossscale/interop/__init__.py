"""States go to other libraries and come from them: one peer a file, imported only by whoever uses it.

``from_<peer>`` takes what the peer saves and gives a loss scale with its configuration and state, which goes on as it
would have in the peer. ``to_<peer>`` gives it back in the same form: one thing, or a pair of configuration and state.
What has no counterpart on the other side is a `UserWarning`. ``torch``, ``keras`` and ``tensorflow`` read dictionaries,
and need nothing of the peer; ``flax`` and ``jmp`` need it installed.

Where a framework needs more than a line, it is here too: ``interop.flax`` has a `TrainState` for linen and an
`Optimizer` for nnx, ``interop.equinox`` has `filter_value_and_scaled_grad`.
"""
