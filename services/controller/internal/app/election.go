package app

import (
	"fmt"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
)

// leaseName is the name of the Lease that the leader holds.
const leaseName = "fast-sandbox-controller"

// newLock returns the lock that this process leads by, which gives calls to agents their term. The lead is lost when the
// Lease cannot be renewed for the deadline: the manager then ends, and with it the process. Nothing is lost by that, for
// without the API server a controller has nothing to do, and all that it knows it reads again.
func newLock(cfg Config, api *rest.Config) (*leader.Lock, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("naming this process: %w", err)
	}
	// A client of its own: requests of the reconcilers do not keep the Lease waiting.
	own := rest.CopyConfig(api)
	own.UserAgent += " (leader-election)"
	leases, err := coordinationv1.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("making the client of the lease: %w", err)
	}
	return leader.NewLock(&resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: cfg.Namespace, Name: leaseName},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())},
	}, cfg.Lease.RenewDeadline/2), nil
}
