#!/bin/bash
cp /tests/test_slugs.py /app
if python3 test_slugs.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
