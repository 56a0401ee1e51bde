def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out of a quick look after a change")
