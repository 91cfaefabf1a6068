"""What kvtransfer's integrations touch of vLLM 0.33, so that they can be imported and driven where it is not installed.

No code of vLLM: names, signatures and fields alone, and as little behaviour as those who are called need. The engines
stage compares them with the package itself.
"""
