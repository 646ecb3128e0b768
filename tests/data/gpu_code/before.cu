struct Params { float* data; };
__device__ __noinline__ float scaled(float x) { return x * 0.5f + 1; }
__global__ void halve(Params p) { __shared__ float s[32]; s[threadIdx.x] = scaled(p.data[threadIdx.x]); __syncthreads(); p.data[threadIdx.x] = s[31 - threadIdx.x]; }
__global__ void clear(Params p) { p.data[threadIdx.x] = 0; }
