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

// newLock returns the lock of the leader election, which provides the term for calls to agents. The process ends if it cannot
// renew the Lease within the deadline. Nothing is lost, because a controller can do nothing without the API server, and reads
// its whole state again.
func newLock(cfg Config, api *rest.Config) (*leader.Lock, error) {
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("naming this process: %w", err)
	}
	// It has a client of its own, so that it does not wait for requests of the reconcilers.
	own := rest.CopyConfig(api)
	own.UserAgent += " (leader-election)"
	leases, err := coordinationv1.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("creating the client of the lease: %w", err)
	}
	return leader.NewLock(&resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: cfg.Namespace, Name: leaseName},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: host + "_" + string(uuid.NewUUID())},
	}, cfg.Lease.RenewDeadline/2), nil
}
