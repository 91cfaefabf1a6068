import numpy as np
import pytest
from kernel_helpers import *
from kvtransfer.kernels.names import READY
@pytest.mark.parametrize("name",sorted(READY))
@pytest.mark.parametrize("kernel",KERNELS)
def test_a(name,kernel):
    rng=fresh_generator()
    spec=KVSpec.attention(2,4,2,16,1) if name!="vllm.MLA" else KVSpec.mla(2,4,24)
    a=ready_memory(name,spec,4,rng); b=page_first_memory(spec,5,rng)
    check_copy(kernel,a,b,rng); 
    a=ready_memory(name,spec,4,rng); b=page_first_memory(spec,5,rng)
    check_copy(kernel,b,a,rng)
