// Compares the declarations in ucx/api.hpp with the headers of an installed UCX, where there are any.
#if __has_include(<ucp/api/ucp.h>)

#include <ucp/api/ucp.h>

#include <type_traits>

#include "megatronapp/transport/ucx/api.hpp"

namespace megatronapp::transport::ucx {
namespace {

// NOLINTBEGIN(cppcoreguidelines-macro-usage,bugprone-*): members have no type to pass to a template
#define SAME_MEMBER(OWN, OWN_MEMBER, UCX, UCX_MEMBER)                      \
    static_assert(offsetof(OWN, OWN_MEMBER) == offsetof(UCX, UCX_MEMBER)); \
    static_assert(sizeof(OWN::OWN_MEMBER) == sizeof(UCX::UCX_MEMBER))

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(static_cast<int>(Status::kInProgress) == UCS_INPROGRESS);
static_assert(static_cast<int>(Status::kBusy) == UCS_ERR_BUSY);
static_assert(static_cast<int>(Status::kLast) == UCS_ERR_LAST);
static_assert(kFeatureWakeup == UCP_FEATURE_WAKEUP);
static_assert(kFeatureActiveMessages == UCP_FEATURE_AM);
static_assert(kParamsFeatures == UCP_PARAM_FIELD_FEATURES);

SAME_MEMBER(ContextParams, features, ucp_params_t, features);
SAME_MEMBER(ContextParams, mt_workers_shared, ucp_params_t, mt_workers_shared);
SAME_MEMBER(ContextParams, estimated_num_eps, ucp_params_t, estimated_num_eps);

static_assert(kWorkerThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(static_cast<int>(ThreadMode::kSerialized) == UCS_THREAD_MODE_SERIALIZED);
SAME_MEMBER(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
SAME_MEMBER(WorkerParams, cpu_mask, ucp_worker_params_t, cpu_mask);
SAME_MEMBER(WorkerParams, event_fd, ucp_worker_params_t, event_fd);
SAME_MEMBER(WorkerParams, flags, ucp_worker_params_t, flags);

static_assert(kEndpointAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(kEndpointErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(kEndpointErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(static_cast<int>(ErrorMode::kPeer) == UCP_ERR_HANDLING_MODE_PEER);
SAME_MEMBER(EndpointParams, address, ucp_ep_params_t, address);
SAME_MEMBER(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
SAME_MEMBER(EndpointParams, error_handler, ucp_ep_params_t, err_handler);
SAME_MEMBER(EndpointParams, flags, ucp_ep_params_t, flags);
SAME_MEMBER(EndpointParams, socket_address, ucp_ep_params_t, sockaddr);
SAME_MEMBER(ErrorHandler, argument, ucp_err_handler_t, arg);

static_assert(kReceivedRendezvous == UCP_AM_RECV_ATTR_FLAG_RNDV);
SAME_MEMBER(ReceivedParams, reply_endpoint, ucp_am_recv_param_t, reply_ep);

static_assert(kHandlerId == UCP_AM_HANDLER_PARAM_FIELD_ID);
static_assert(kHandlerCallback == UCP_AM_HANDLER_PARAM_FIELD_CB);
static_assert(kHandlerArgument == UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME_MEMBER(HandlerParams, id, ucp_am_handler_param_t, id);
SAME_MEMBER(HandlerParams, callback, ucp_am_handler_param_t, cb);
SAME_MEMBER(HandlerParams, argument, ucp_am_handler_param_t, arg);

static_assert(kOperationCallback == UCP_OP_ATTR_FIELD_CALLBACK);
static_assert(kOperationUserData == UCP_OP_ATTR_FIELD_USER_DATA);
static_assert(kOperationDatatype == UCP_OP_ATTR_FIELD_DATATYPE);
static_assert(kDatatypeIov == UCP_DATATYPE_IOV);
static_assert(sizeof(IovEntry) == sizeof(ucp_dt_iov_t));
SAME_MEMBER(IovEntry, buffer, ucp_dt_iov_t, buffer);
SAME_MEMBER(IovEntry, length, ucp_dt_iov_t, length);
static_assert(kOperationFlags == UCP_OP_ATTR_FIELD_FLAGS);
static_assert(kOperationMemoryType == UCP_OP_ATTR_FIELD_MEMORY_TYPE);
static_assert(kSendEager == UCP_AM_SEND_FLAG_EAGER);
static_assert(kSendRendezvous == UCP_AM_SEND_FLAG_RNDV);
static_assert(kCloseForce == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(static_cast<int>(MemoryType::kHost) == UCS_MEMORY_TYPE_HOST);
SAME_MEMBER(RequestParams, attributes, ucp_request_param_t, op_attr_mask);
SAME_MEMBER(RequestParams, flags, ucp_request_param_t, flags);
SAME_MEMBER(RequestParams, request, ucp_request_param_t, request);
SAME_MEMBER(RequestParams, callback, ucp_request_param_t, cb);
SAME_MEMBER(RequestParams, datatype, ucp_request_param_t, datatype);
SAME_MEMBER(RequestParams, user_data, ucp_request_param_t, user_data);
SAME_MEMBER(RequestParams, memory_type, ucp_request_param_t, memory_type);
SAME_MEMBER(RequestParams, memory, ucp_request_param_t, memh);

#undef SAME_MEMBER
// NOLINTEND(cppcoreguidelines-macro-usage,bugprone-*)

}  // namespace
}  // namespace megatronapp::transport::ucx

#endif
