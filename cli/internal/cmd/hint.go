package cmd

import (
	"errors"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/transfer"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Reasons of errors of fsb-ctl itself. Servers never send them.
const (
	reasonConnection   fault.Reason = "CONNECTION_FAILED"
	reasonCertificate  fault.Reason = "CERTIFICATE_NOT_ACCEPTED"
	reasonNoIdentity   fault.Reason = "NO_CERTIFICATE"
	reasonNoJanitor    fault.Reason = "JANITOR_NOT_FOUND"
	reasonNoContainer  fault.Reason = "CONTAINER_NOT_FOUND"
	reasonSweepFailed  fault.Reason = "SWEEP_INCOMPLETE"
	reasonNoCollector  fault.Reason = "COLLECTOR_NOT_FOUND"
	reasonNoKind       fault.Reason = "KIND_NOT_FOUND"
	reasonNoObject     fault.Reason = "OBJECT_NOT_FOUND"
	reasonEditCanceled fault.Reason = "EDIT_CANCELED"
	reasonNoTrace      fault.Reason = "NO_TRACE"
	reasonLocalPort    fault.Reason = "LOCAL_PORT_UNAVAILABLE"
)

const envHint = "set FSB_ADDR and FSB_CACERT, and FSB_CERT and FSB_KEY or FSB_TOKEN; with the local cluster: eval \"$(make -s env)\""

// hint returns advice on an error, or "".
func hint(reason fault.Reason, err error) string {
	text := err.Error()
	if fault.IsUnsettled(err) {
		return "it is not known whether the sandbox exists: " + unsettledAdvice(err)
	}
	switch reason {
	case reasonConnection:
		if strings.Contains(text, plaintextSign) {
			return "the server uses plaintext: use --insecure (FSB_INSECURE=true) or another address"
		}
		return "check that the allocator is running and that its address is correct; " + envHint
	case reasonCertificate:
		if strings.Contains(text, "expired") {
			return "a certificate has expired: renew it (FSB_CACERT, FSB_CERT, FSB_KEY)"
		}
		return "FSB_CACERT must be the authority of the server, and FSB_CERT and FSB_KEY a certificate that it issued for a user"
	case reasonNoIdentity:
		return envHint
	case fault.PoolNotFound:
		return "fsb-ctl pool list"
	case fault.NoCapacity:
		return "try again later, raise the poolMax of the pool, or delete sandboxes; see fsb-ctl pool list"
	case fault.PortConflict:
		return "the sandboxes of an agent share its network: use another port, or more agents"
	case fault.ImageNotFound:
		return "check the reference; for a private image, the agents of the pool need credentials"
	case fault.ImageInvalid:
		return "the message says what is wrong with the image: correct it and push it again"
	case fault.ImagePullFailed:
		return "check that the node can reach the registry of the image"
	case fault.CommandNotFound, fault.CommandNotExecutable:
		return "use the path of the command in the image: -- /bin/sh -c '...'"
	case fault.UserNotFound:
		return "the image's USER is not in its /etc/passwd"
	case fault.WorkingDirInvalid:
		return "--workdir must be a directory inside the image"
	case fault.SandboxNotFound:
		return "fsb-ctl list"
	case fault.SandboxExists:
		return "delete the sandbox first, or omit NAME for a generated name"
	case fault.RequestIDReused:
		return "a --request-id is for one request: use another id"
	case fault.DeadlineExceeded:
		return "use a longer timeout, for instance --timeout 5m: the image may have to be pulled first"
	case fault.PermissionDenied:
		return "fsb-ctl auth whoami and fsb-ctl auth can-i show who you are and what you may do; a ClusterRole such as fast-sandbox-edit gives rights"
	case fault.Unauthenticated:
		return "the token is invalid, has expired, or is for another audience: kubectl create token NAME --audience fast-sandbox.io"
	case fault.ServiceAccountNotFound:
		return "kubectl create serviceaccount NAME"
	case fault.Overloaded, fault.CallerLimitExceeded, fault.NotLeader, fault.AgentUnavailable, fault.RuntimeUnavailable, fault.APIUnavailable:
		return "this is temporary: try again with a longer --timeout"
	case fault.SandboxTerminating:
		return "the sandbox is being deleted: wait for the end with fsb-ctl delete NAME"
	case fault.PhaseConflict:
		return "fsb-ctl describe NAME"
	case fault.Internal:
		return "the log of the server has the details; -v prints the trace id"
	default:
		return clusterHint(reason, err)
	}
}

// clusterHint returns advice on errors of files, the cluster, the janitors, the garbage collectors and the trace store.
func clusterHint(reason fault.Reason, err error) string {
	switch reason {
	case fault.FileAccessDenied:
		return "use another user of the sandbox: --user root"
	case reasonLocalPort:
		return "use another local port, or :REMOTE for any free one"
	case transfer.ReasonUnsafe:
		return "the sandbox did not send what was asked for: do not trust what it has copied so far"
	case fault.QuotaExceeded:
		return "delete sandboxes, or have the quota raised: kubectl describe resourcequota -n NAMESPACE"
	case tunnel.ReasonNoCluster:
		return "select a cluster with --kubeconfig FILE (or KUBECONFIG) and --context"
	case tunnel.ReasonCluster:
		if errdefs.IsPermissionDenied(err) || errdefs.IsUnauthorized(err) {
			return "the user of the kubeconfig must be allowed to list pods, and to get and create pods/portforward, in the namespace"
		}
		return "check the cluster and the kubeconfig: kubectl get nodes"
	case tunnel.ReasonPod:
		return "kubectl get pods -A -o wide"
	case reasonNoJanitor:
		return "kubectl get pods -A -o wide -l " + janitorLabels
	case reasonNoCollector:
		return "kubectl get pods -A -o wide -l " + gcLabels
	case reasonNoKind:
		return "kubectl api-resources"
	case reasonNoObject:
		return "check the name and the namespace (-n); the kind may not be watched: fsb-ctl gc status"
	case reasonNoContainer:
		return "fsb-ctl janitor verdicts"
	case reasonSweepFailed:
		return "the janitor repeats the deletion; its log has the details"
	case jaeger.ReasonUnavailable:
		return "set --jaeger-address (FSB_JAEGER_ADDRESS); the local cluster has a trace store after: make trace"
	case jaeger.ReasonNotFound, reasonNoTrace:
		return "spans are exported some seconds after a call, and only if a trace store is configured: make trace"
	default:
		return ""
	}
}

// unsettledAdvice returns what to do after a create with an unknown outcome.
func unsettledAdvice(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		if namespace, name, ok := strings.Cut(f.Metadata()["sandbox"], "/"); ok {
			return "fsb-ctl delete " + name + " -n " + namespace
		}
	}
	return "fsb-ctl list"
}
