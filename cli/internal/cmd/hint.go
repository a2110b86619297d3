package cmd

import (
	"errors"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Reasons of errors that this program itself finds; servers never send them.
const (
	reasonConnection  fault.Reason = "CONNECTION_FAILED"
	reasonCertificate fault.Reason = "CERTIFICATE_NOT_ACCEPTED"
	reasonNoIdentity  fault.Reason = "NO_CERTIFICATE"
	reasonNoJanitor   fault.Reason = "JANITOR_NOT_FOUND"
	reasonNoContainer fault.Reason = "CONTAINER_NOT_FOUND"
	reasonSweepFailed fault.Reason = "SWEEP_INCOMPLETE"
	reasonNoCollector fault.Reason = "COLLECTOR_NOT_FOUND"
	reasonNoKind      fault.Reason = "KIND_NOT_FOUND"
	reasonNoObject    fault.Reason = "OBJECT_NOT_FOUND"
)

const envHint = "set FSB_ADDR, FSB_CACERT, FSB_CERT and FSB_KEY; with the local cluster: eval \"$(make -s env)\""

// hint is what to try next, or "".
func hint(reason fault.Reason, err error) string {
	text := err.Error()
	if fault.IsUnsettled(err) {
		return "whether the sandbox exists is not known: " + unsettledAdvice(err)
	}
	switch reason {
	case reasonConnection:
		if strings.Contains(text, plaintextSign) {
			return "the server speaks plaintext: --insecure (FSB_INSECURE=true), or another address"
		}
		return "is the allocator up, and its address right? " + envHint
	case reasonCertificate:
		if strings.Contains(text, "expired") {
			return "a certificate has expired; get new ones (FSB_CACERT, FSB_CERT, FSB_KEY)"
		}
		return "FSB_CACERT must be the authority of the allocator, and FSB_CERT, FSB_KEY a pair that it issued for the role \"client\""
	case reasonNoIdentity:
		return envHint
	case fault.PoolNotFound:
		return "fsb-ctl pool list"
	case fault.NoCapacity:
		return "try again in a moment, raise the pool's poolMax, or delete sandboxes: fsb-ctl pool list"
	case fault.PortConflict:
		return "sandboxes of an agent share its network: use another port, or more agents"
	case fault.ImageNotFound:
		return "check the reference; a private image needs the pool's agents to have its credentials"
	case fault.ImageInvalid:
		return "the image itself is broken: push it anew"
	case fault.ImagePullFailed:
		return "the node could not fetch the image; is its registry reachable from there?"
	case fault.CommandNotFound, fault.CommandNotExecutable:
		return "give the command's path inside the image: -- /bin/sh -c '...'"
	case fault.UserNotFound:
		return "the image's USER is not in its /etc/passwd"
	case fault.WorkingDirInvalid:
		return "--workdir must be a directory inside the image"
	case fault.SandboxNotFound:
		return "fsb-ctl list"
	case fault.SandboxExists:
		return "fsb-ctl delete it first, or leave NAME out and get a new one"
	case fault.RequestIDReused:
		return "a --request-id stands for one request; use another"
	case fault.DeadlineExceeded:
		return "give it more time: --timeout 5m (an image may have to be pulled first)"
	case fault.PermissionDenied:
		return "the certificate needs the URI SAN spiffe://fast-sandbox.io/client"
	case fault.Overloaded, fault.NotLeader, fault.AgentUnavailable, fault.RuntimeUnavailable, fault.APIUnavailable:
		return "this should pass; try again, with a longer --timeout"
	case fault.SandboxTerminating:
		return "it is being deleted; wait for that to end: fsb-ctl delete NAME"
	case fault.PhaseConflict:
		return "fsb-ctl describe NAME"
	case fault.Internal:
		return "the allocator's log has the details; -v prints the trace id to look for"
	default:
		return clusterHint(reason, err)
	}
}

// clusterHint is hint for the errors that come on the way to a janitor or a garbage collector, and from those.
func clusterHint(reason fault.Reason, err error) string {
	switch reason {
	case tunnel.ReasonNoCluster:
		return "--kubeconfig FILE (or KUBECONFIG) and --context say which cluster"
	case tunnel.ReasonCluster:
		if errdefs.IsPermissionDenied(err) || errdefs.IsUnauthorized(err) {
			return "your user must be allowed to list pods, and to get and create pods/portforward, in " + systemNamespace
		}
		return "is the cluster up, and the kubeconfig right? kubectl get nodes"
	case tunnel.ReasonPod:
		return "kubectl get pods -n " + systemNamespace + " -o wide"
	case reasonNoJanitor:
		return "kubectl get pods -A -o wide -l " + janitorLabels
	case reasonNoCollector:
		return "kubectl get pods -A -o wide -l " + gcLabels
	case reasonNoKind:
		return "kubectl api-resources"
	case reasonNoObject:
		return "is it there, and in this namespace (-n)? Its kind may be one that is not watched: fsb-ctl gc status"
	case reasonNoContainer:
		return "fsb-ctl janitor verdicts"
	case reasonSweepFailed:
		return "the janitor tries again by itself; its log has the details"
	default:
		return ""
	}
}

// unsettledAdvice is what to do after a create that may have been carried out.
func unsettledAdvice(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		if namespace, name, ok := strings.Cut(f.Metadata()["sandbox"], "/"); ok {
			return "fsb-ctl delete " + name + " -n " + namespace
		}
	}
	return "fsb-ctl list"
}
