/* cuBLAS and cuDNN: handles, and for every problem one algorithm.

   cuBLAS's workspace is PyTorch's own allocation, so it is seen. cuDNN says how much workspace each of its algorithms
   wants; that is not known here: it is 0, or FXMEM_STUB_CUDNN_WORKSPACE bytes, so that what handles one can be tried. */
#include "stub.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    COUNTED;
    *handle = stub_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
    COUNTED;
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    COUNTED;
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    COUNTED;
    *handle = stub_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) {
    COUNTED;
    *desc = stub_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    COUNTED;
    *preference = stub_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t leading) {
    COUNTED;
    *layout = stub_handle();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *count) {
    COUNTED;
    *count = wanted > 0;
    if (wanted > 0)
        memset(results, 0, sizeof *results);
    return CUBLAS_STATUS_SUCCESS;
}

/* -- cuDNN ------------------------------------------------------------------------------------------------------------ */

static size_t workspace_bytes(void) {
    const char *text = getenv("FXMEM_STUB_CUDNN_WORKSPACE");
    return text ? strtoull(text, NULL, 10) : 0;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t status) { return "an error of the cuDNN stub"; }

void cudnnGetLastErrorString(char *message, size_t length) {
    if (length)
        *message = 0;
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int *value) {
    COUNTED;
    *value = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

#define CREATES(function, type)                                                                                             \
    cudnnStatus_t function(type *made) {                                                                                    \
        COUNTED;                                                                                                            \
        *made = stub_handle();                                                                                              \
        return CUDNN_STATUS_SUCCESS;                                                                                        \
    }
CREATES(cudnnCreate, cudnnHandle_t)
CREATES(cudnnCreateActivationDescriptor, cudnnActivationDescriptor_t)
CREATES(cudnnCreateCTCLossDescriptor, cudnnCTCLossDescriptor_t)
CREATES(cudnnCreateConvolutionDescriptor, cudnnConvolutionDescriptor_t)
CREATES(cudnnCreateDropoutDescriptor, cudnnDropoutDescriptor_t)
CREATES(cudnnCreateFilterDescriptor, cudnnFilterDescriptor_t)
CREATES(cudnnCreatePoolingDescriptor, cudnnPoolingDescriptor_t)
CREATES(cudnnCreateRNNDataDescriptor, cudnnRNNDataDescriptor_t)
CREATES(cudnnCreateRNNDescriptor, cudnnRNNDescriptor_t)
CREATES(cudnnCreateSpatialTransformerDescriptor, cudnnSpatialTransformerDescriptor_t)
CREATES(cudnnCreateTensorDescriptor, cudnnTensorDescriptor_t)

cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *nbytes) {
    COUNTED;
    *nbytes = 1 << 20;
    return CUDNN_STATUS_SUCCESS;
}

/* The graph interface (convolutions, attention): a search finds one engine, which has a plan and no notes. */
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *made) {
    COUNTED;
    *made = stub_handle();
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t attribute,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t *count, void *values) {
    COUNTED;
    int64_t found = 1;
    switch ((int)attribute) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: /* written into descriptors that the caller made */
    case CUDNN_ATTR_ENGINECFG_ENGINE:
        break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
        if (values)
            *(int64_t *)values = workspace_bytes();
        break;
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
        if (values)
            *(int32_t *)values = 0;
        break;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
        if (values)
            *(int64_t *)values = 0;
        break;
    default:
        found = 0;
    }
    if (count)
        *count = found;
    return CUDNN_STATUS_SUCCESS;
}

/* The older interface: transposed and depthwise convolutions of some layouts, batch normalization, CTC. */
#define CHOOSES(function, result, filter_or_x, x_or_filter)                                                                 \
    cudnnStatus_t function(cudnnHandle_t handle, const filter_or_x a, const x_or_filter b,                                  \
                           const cudnnConvolutionDescriptor_t c, const cudnnTensorDescriptor_t d, const int wanted,         \
                           int *count, result *results) {                                                                   \
        COUNTED;                                                                                                            \
        memset(results, 0, sizeof *results);                                                                                \
        results->algo = 1;                                                                                                  \
        results->memory = workspace_bytes();                                                                                \
        results->determinism = CUDNN_DETERMINISTIC;                                                                         \
        *count = 1;                                                                                                         \
        return CUDNN_STATUS_SUCCESS;                                                                                        \
    }
CHOOSES(cudnnGetConvolutionForwardAlgorithm_v7, cudnnConvolutionFwdAlgoPerf_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t)
CHOOSES(cudnnGetConvolutionBackwardDataAlgorithm_v7, cudnnConvolutionBwdDataAlgoPerf_t, cudnnFilterDescriptor_t,
        cudnnTensorDescriptor_t)

cudnnStatus_t cudnnGetConvolutionBackwardFilterAlgorithm_v7(cudnnHandle_t handle, const cudnnTensorDescriptor_t a,
                                                            const cudnnTensorDescriptor_t b,
                                                            const cudnnConvolutionDescriptor_t c,
                                                            const cudnnFilterDescriptor_t d, const int wanted, int *count,
                                                            cudnnConvolutionBwdFilterAlgoPerf_t *results) {
    COUNTED;
    memset(results, 0, sizeof *results);
    results->algo = 1;
    results->memory = workspace_bytes();
    results->determinism = CUDNN_DETERMINISTIC;
    *count = 1;
    return CUDNN_STATUS_SUCCESS;
}

/* Sizes, each by its last argument. */
#define SIZE(function, ...)                                                                                                 \
    cudnnStatus_t function(__VA_ARGS__, size_t *nbytes) {                                                                   \
        COUNTED;                                                                                                            \
        *nbytes = workspace_bytes();                                                                                        \
        return CUDNN_STATUS_SUCCESS;                                                                                        \
    }
SIZE(cudnnGetConvolutionForwardWorkspaceSize, cudnnHandle_t h, const cudnnTensorDescriptor_t x, const cudnnFilterDescriptor_t w,
     const cudnnConvolutionDescriptor_t c, const cudnnTensorDescriptor_t y, cudnnConvolutionFwdAlgo_t algo)
SIZE(cudnnGetConvolutionBackwardDataWorkspaceSize, cudnnHandle_t h, const cudnnFilterDescriptor_t w,
     const cudnnTensorDescriptor_t dy, const cudnnConvolutionDescriptor_t c, const cudnnTensorDescriptor_t dx,
     cudnnConvolutionBwdDataAlgo_t algo)
SIZE(cudnnGetConvolutionBackwardFilterWorkspaceSize, cudnnHandle_t h, const cudnnTensorDescriptor_t x,
     const cudnnTensorDescriptor_t dy, const cudnnConvolutionDescriptor_t c, const cudnnFilterDescriptor_t dw,
     cudnnConvolutionBwdFilterAlgo_t algo)

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t *nbytes) {
    COUNTED;
    *nbytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale, const cudnnActivationDescriptor_t activation,
    size_t *nbytes) {
    COUNTED;
    *nbytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t mode,
                                                                   cudnnBatchNormOps_t ops,
                                                                   const cudnnActivationDescriptor_t activation,
                                                                   const cudnnTensorDescriptor_t x, size_t *nbytes) {
    COUNTED;
    *nbytes = 0;
    return CUDNN_STATUS_SUCCESS;
}
