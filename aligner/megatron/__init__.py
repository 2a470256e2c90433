"""The only room that imports megatron.core."""

import warnings

# megatron-core tells, at import and in every model it builds, of each optional GPU library that is absent. It falls back
# to torch, which is what a CPU run wants, and the lines would drown what a log is read for.
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|apex|transformer_engine).*not installed")
