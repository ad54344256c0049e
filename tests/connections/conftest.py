import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_numbers(request):
    """Fresh random inputs at every run; the seed is shown when a test fails."""
    seed = torch.seed() % 2**32
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})  # {request.node.name}")
