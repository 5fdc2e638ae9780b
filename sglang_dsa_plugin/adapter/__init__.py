"""The only package here that imports sglang. SGLang enters through `plugin.register` and `platform.activate`."""
