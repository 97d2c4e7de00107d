#!/bin/bash
cp /tests/test_versions.py /app
if python3 test_versions.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
