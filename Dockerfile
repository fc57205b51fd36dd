# opshim on vLLM for NVIDIA GPUs. Build: docker build --build-arg ARCHS=90a -t opshim .
# Run:   docker run --gpus all -p 8000:8000 -v /models:/models opshim serve /models/Qwen3-Next-80B-A3B-Instruct --host 0.0.0.0
# Check: docker run --gpus all opshim probe

# ---- the native libraries, built without a GPU and without torch's CUDA build ----
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
ARG ARCHS=80,86,89,90a,100
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip python3-venv g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir torch==2.11.0 --index-url https://download.pytorch.org/whl/cpu \
    && /venv/bin/pip install --no-cache-dir click==8.3.1 ninja==1.13.0 numpy==2.3.5
WORKDIR /opshim
COPY . .
RUN OPSHIM_CACHE=/tmp/objects /venv/bin/python runner.py build --arch "$ARCHS"

# ---- the server ----
FROM vllm/vllm-openai:v0.24.0
COPY --from=build /opshim /opshim
WORKDIR /opshim
RUN python3 -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && python3 runner.py probe --static
ENTRYPOINT ["python3", "/opshim/runner.py"]
CMD ["serve", "--host", "0.0.0.0"]
