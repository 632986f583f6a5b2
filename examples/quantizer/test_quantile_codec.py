import pytest
from quantile_codec import QuantileCodec

from zpp_lab.codecs.contract import check_codec


@pytest.mark.parametrize("codec", [QuantileCodec(), QuantileCodec(block_size=256)])
def test_contract(codec):
    check_codec(codec)
